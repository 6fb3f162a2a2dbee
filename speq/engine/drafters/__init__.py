"""Drafters, which propose tokens: one file and one line of `speq.registries.DRAFTERS` each."""
