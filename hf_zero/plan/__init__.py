"""What a run will take, and what it took: bytes and seconds."""
