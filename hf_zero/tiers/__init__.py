"""Storage on the device, in host memory and on disk."""
