"""Model families: loading everything but the experts, and running passes."""
