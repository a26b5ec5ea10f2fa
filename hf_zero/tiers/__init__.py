"""Where bytes rest: device, host memory, disk."""
