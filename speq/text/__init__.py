"""Prompts in, text out: tokenizers, prompts of every kind, and text as it comes."""
