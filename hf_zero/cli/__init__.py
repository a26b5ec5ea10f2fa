"""The command `hf-zero`."""

OK, WRONG, USAGE = 0, 1, 2
"""Exit statuses of every command: all is well; something is wrong or failed; invalid arguments."""
