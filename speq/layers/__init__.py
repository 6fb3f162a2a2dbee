"""The modules that take the place of routed experts, of dense layers and of the embedding."""
