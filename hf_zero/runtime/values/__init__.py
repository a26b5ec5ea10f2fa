"""Parameters of a sharded model: their values at rest and gathered, their gradients, what programs read and write."""
