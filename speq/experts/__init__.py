"""Exact experts and INT4 codes: codecs, storage on disk, and expert slots."""
