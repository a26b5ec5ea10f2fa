"""Programs that trained wrongly, stalled or crashed once."""
