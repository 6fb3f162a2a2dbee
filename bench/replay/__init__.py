"""What a policy would have done: recorded routes through the real scheduler."""
