"""Brings a model's weights, its draft and its experts into memory, as a plan has it."""
