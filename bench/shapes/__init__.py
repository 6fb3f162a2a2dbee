"""Models of random weights in the exact shapes of published ones, and what runs on them take."""
