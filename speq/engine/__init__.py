"""The loop that turns a prompt into tokens: read engine.py first."""
