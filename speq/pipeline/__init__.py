"""Layers of one model on several machines: how stages meet, and what they say to each other."""
