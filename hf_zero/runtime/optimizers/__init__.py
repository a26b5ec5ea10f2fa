"""Optimizers over shards: which can be bound, their steps on the device, in host memory and on disk, clipping."""
