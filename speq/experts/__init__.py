"""Exact experts and INT4 codes: their codecs, where they lie on disk, and their slots."""
