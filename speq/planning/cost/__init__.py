"""What a way to hold experts is expected to cost: bytes, misses and time per token."""
