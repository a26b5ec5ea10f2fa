"""Arrays to folders and back."""
