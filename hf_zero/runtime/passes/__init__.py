"""Forward and backward: when a unit is gathered, released and reduced."""
