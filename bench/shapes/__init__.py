"""Models in the shapes of published ones, with random weights."""
