"""Programs that trained wrongly, stalled or crashed, as users wrote them."""
