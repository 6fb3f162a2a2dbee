"""Chooses how many tokens to draft, from numbers alone. Imports no torch."""
