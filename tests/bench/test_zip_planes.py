"""Words split into planes and joined again, bit for bit; and what is no plane is refused."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from speq.bench.rivals.zip_planes import CHUNK_WORDS, Deflater, Inflater, Words
from speq.errors import SpeqError

ODD_SIZES = (1, 2, 3, 127, 65_535, 65_537, CHUNK_WORDS, CHUNK_WORDS + 1, 2 * CHUNK_WORDS - 5)


def joined(words: Words) -> Words:
    out = np.full_like(words, 0xABCD)
    at, inflater = 0, Inflater()
    for compressed, signs in Deflater().chunks(words):
        inflater.join(memoryview(compressed), signs, out[at : at + len(signs)])
        at += len(signs)
    assert at == len(words)
    return out


@pytest.fixture
def zstandard() -> Any:
    return pytest.importorskip("zstandard")


@pytest.mark.usefixtures("zstandard")
def test_every_word_there_is() -> None:
    """NaNs, infinities, denormals and both zeros among them."""
    words = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(joined(words), words)


def test_planes_are_sign_exponent_and_mantissa(zstandard: Any) -> None:
    one, minus_three_halves, infinity = 0x3F80, 0xBFC0, 0x7F80
    words = np.array([one, minus_three_halves, infinity, 0x8001], np.uint16)
    [(compressed, signs)] = Deflater().chunks(words)
    assert signs.tolist() == [0, 0x80 | 0x40, 0, 0x81]
    assert list(zstandard.ZstdDecompressor().decompress(compressed)) == [127, 127, 255, 0]


@pytest.mark.usefixtures("zstandard")
@pytest.mark.parametrize("size", ODD_SIZES)
def test_odd_sizes(size: int) -> None:
    random = np.random.default_rng(size)
    for words in (
        random.integers(0, 1 << 16, size, np.uint16),
        (random.standard_normal(size, np.float32).view(np.uint32) >> 16).astype(np.uint16),
        np.zeros(size, np.uint16),
    ):
        np.testing.assert_array_equal(joined(words), words)


@pytest.mark.usefixtures("zstandard")
def test_exponents_of_weights_take_less_than_their_bytes() -> None:
    random = np.random.default_rng(1)
    words = (random.standard_normal(CHUNK_WORDS, np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    exponents = (words >> 7 & 0xFF).astype(np.int64)
    share = np.bincount(exponents) / len(words)
    entropy = -sum(each * np.log2(each) for each in share if each)
    [(compressed, _)] = Deflater().chunks(words)
    bits = 8 * len(compressed) / len(words)
    assert entropy < bits < entropy + 0.15


@pytest.mark.usefixtures("zstandard")
@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        (lambda good: good[:-1], 1000, "src size is incorrect|did not decompress full frame"),
        (lambda good: b"", 1000, "content size"),
        (lambda good: b"\0" * len(good), 1000, "content size|frame header"),
        (lambda good: good, 999, "1000 exponents of 999 words"),
        (lambda good: good, 1001, "1000 exponents of 1001 words"),
    ],
    ids=["cut", "empty", "zeros", "too many", "too few"],
)
def test_what_is_no_plane_is_refused(
    change: Callable[[bytes], bytes], words: int, reason: str
) -> None:
    given = np.random.default_rng(2).integers(0, 1 << 16, 1000, np.uint16)
    [(compressed, signs)] = Deflater().chunks(given)
    with pytest.raises(ValueError, match=reason):
        Inflater().join(change(compressed), signs, np.empty(words, np.uint16))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SpeqError, match=r"zstandard.* pip install zstandard") as refused:
        Deflater()
    assert "\n" not in str(refused.value)
