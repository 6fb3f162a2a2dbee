"""What stands in for a block's routed experts."""
