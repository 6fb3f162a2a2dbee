"""Damaged inputs of fifteen classes, made by a seed, for the command and the library."""
