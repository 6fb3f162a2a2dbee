"""Texts of random tokens, the same for every program that runs them."""

import random


def random_tokens(vocab_size: int, tokens: int, seed: int) -> list[int]:
    """So many ids below vocab_size."""
    return random.Random(seed).choices(range(vocab_size), k=tokens)
