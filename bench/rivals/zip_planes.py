"""BF16 words as two planes of bytes: exponents under ZSTD, and signs with mantissas as they are.

ZipMoE (arXiv:2601.21198) holds exact experts so: signs and mantissas are as good as random, and an
exponent has under three bits of entropy. Planes are cut in chunks, which threads inflate apart.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speq.errors import DependencyError

# Words of a chunk: two of ZSTD's own blocks of exponents.
CHUNK_WORDS = 1 << 18
# Words joined at a time: both planes, the words and what is between lie in a core's cache.
BLOCK_WORDS = 1 << 16
# ZSTD finds short matches in what has none, and they cost more bits and more time than their bytes
# one by one. Exponents of the widened bundled model took 2.60 bits so, inflated in half the time
# that those of level 1 as it is took (2.86 bits), or of level 3, the default (3.17 bits).
LEVEL, MIN_MATCH, HASH_LOG = 1, 7, 6
# What a thread that inflates holds: a chunk's exponents, a block of words, and ZSTD's own.
INFLATING_BYTES = CHUNK_WORDS + 2 * BLOCK_WORDS + (1 << 18)

EXPONENT_SHIFT = 7
# The sign and the mantissa, once a byte is widened with its sign.
SIGN_AND_MANTISSA = np.int16(-0x8000 | 0x7F)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


def zstandard() -> ModuleType:
    """The package. Raises SpeqError where it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise DependencyError(
            "exponents are compressed with the package zstandard, which is not installed; "
            "pip install zstandard"
        ) from error
    return zstandard


class Deflater:
    """Splits words and compresses their exponents. Each thread has its own."""

    def __init__(self) -> None:
        library = zstandard()
        settings = library.ZstdCompressionParameters.from_level(
            LEVEL, min_match=MIN_MATCH, hash_log=HASH_LOG
        )
        self._compressor = library.ZstdCompressor(compression_params=settings)

    def chunks(self, words: Words) -> Iterator[tuple[bytes, Bytes]]:
        """(compressed exponents, signs and mantissas) of each CHUNK_WORDS words [N]."""
        for start in range(0, len(words), CHUNK_WORDS):
            chunk = words[start : start + CHUNK_WORDS]
            exponents = (chunk >> EXPONENT_SHIFT).astype(np.uint8)
            signs = (chunk >> 8 & 0x80 | chunk & 0x7F).astype(np.uint8)
            yield self._compressor.compress(exponents), signs


class Inflater:
    """Inflates exponents and joins them with the other plane. Each thread has its own."""

    def __init__(self) -> None:
        self._library = zstandard()
        self._decompressor = self._library.ZstdDecompressor()
        self._block = np.empty(BLOCK_WORDS, np.int16)

    def join(self, compressed: Any, signs: Bytes, words: Words) -> None:
        """Fill `words` [N] from a chunk's compressed exponents, a buffer, and its signs [N].

        Raises ValueError where these are not the exponents of so many words.
        """
        try:
            said = self._library.frame_content_size(compressed)
            if said != len(words):  # asked before so much memory is
                raise ValueError(f"{said} exponents of {len(words)} words")
            inflated = self._decompressor.decompress(compressed)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error
        exponents = np.frombuffer(inflated, np.uint8)
        for start in range(0, len(words), BLOCK_WORDS):
            block = slice(start, start + BLOCK_WORDS)
            joined, others = words[block], self._block[: len(words) - start]
            np.left_shift(exponents[block], EXPONENT_SHIFT, out=joined, dtype=np.uint16)
            widened = signs[block].view(np.int8)
            np.bitwise_and(widened, SIGN_AND_MANTISSA, out=others, dtype=np.int16)
            np.bitwise_or(joined, others.view(np.uint16), out=joined)
