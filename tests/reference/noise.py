"""The noise of a drawn token, from its definition: the words of Philox4x64-10 (Salmon, Moraes, Dror
and Shaw, SC 2011), and exponential draws from them, in whole numbers and by `math`.
"""

import math

import numpy as np

MASK = 2**64 - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """The four words of one block, after ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & MASK,
            (first >> 64) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def words(seed: int, position: int, stream: int, count: int) -> list[int]:
    """The first words of a stream of a position. Its blocks are counted from 1."""
    blocks = (philox((at + 1, stream, position, 0), (seed, 0)) for at in range(-(-count // 4)))
    return [word for block in blocks for word in block][:count]


def noise(seed: int, position: int, size: int) -> np.ndarray:
    """[size] float32 exponential draws: of a place in the unit interval by 32 bits (halves of the
    words of stream 0, low ones first); within the first 2^22 of 2^32 parts 53 bits of stream 1 say
    where, elsewhere it is the middle.
    """
    halves = [
        half
        for word in words(seed, position, 0, -(-size // 2))
        for half in (word & 0xFFFFFFFF, word >> 32)
    ][:size]
    within = iter(words(seed, position, 1, sum(half < 2**22 for half in halves)))
    places = [
        half + (((next(within) >> 11) + 0.5) / 2**53 if half < 2**22 else 0.5) for half in halves
    ]
    return np.array([-math.log1p(-place / 2**32) for place in places], dtype=np.float32)
