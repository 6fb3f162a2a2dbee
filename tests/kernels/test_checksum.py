"""CRC-32 of records, beside zlib's."""

import random
import zlib
from collections.abc import Iterator

import pytest
import torch

from speq.kernels import checksum
from tests.helpers.backends import Backend, backend_named
from tests.helpers.needed import absent


@pytest.fixture(params=["cpu-avx512", "cpu-avx2"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Lanes of 512 bits are used from AVX-512 on, and of 128 below."""
    yield from backend_named(request)


def test_it_is_what_zlib_says(backend: Backend, pytestconfig: pytest.Config) -> None:
    """At every length up to several blocks of lanes, from any address, and over long ones."""
    if checksum.native_crc32() is None:
        absent(pytestconfig, "cpu", "the library has no CRC-32 for this processor")
    drawn = random.Random(1)
    data = torch.tensor(list(drawn.randbytes(1 << 16)), dtype=torch.uint8)
    lengths = [*range(600), *(drawn.randrange(1 << 15) for _ in range(100)), 1 << 15]
    for nbytes in lengths:
        start = drawn.randrange(100)
        part = data[start : start + nbytes]
        assert checksum.crc32_of(part) == zlib.crc32(bytes(part.tolist())), (start, nbytes)


def test_without_the_library_it_is_zlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "native_crc32", lambda: None)
    data = torch.arange(200, dtype=torch.uint8)
    assert checksum.crc32_of(data[3:]) == zlib.crc32(bytes(range(3, 200)))
    assert checksum.crc32_of(data[:0]) == 0
