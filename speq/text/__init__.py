"""Tokenizers, prompts, chat templates, and streaming of text."""
