"""The modules that take the place of a block's routed experts."""
