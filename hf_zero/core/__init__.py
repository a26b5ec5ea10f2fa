"""Which elements belong together, and in which types: no values, no processes."""
