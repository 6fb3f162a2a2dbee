"""Chooses how many tokens to draft. Numbers in, a length and a reason out; imports no torch."""
