"""Parameters created, read and written by users: `Init`, `GatheredParameters` and the accessors."""
