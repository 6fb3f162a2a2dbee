"""Model families, loading all of a model but its experts, and running it."""
