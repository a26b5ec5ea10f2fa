"""The command `hf-zero`."""
