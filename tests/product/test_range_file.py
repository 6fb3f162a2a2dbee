"""Reads of byte ranges, past the page cache and through it, against the file's own bytes."""

import errno
import fcntl
import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import SpeqError
from speq.bench.machine.page_cache import cached_bytes, drop
from speq.files import range_file
from speq.files.alignment import ALIGNMENT, align, allocate_aligned, free_memory
from speq.files.range_file import ENDS_BYTES, RangeFile
from tests.helpers.direct_reads import ask_for_blocks, reads_directly
from tests.helpers.open_files import open_files

SIZE = 13 * ALIGNMENT + 77


@pytest.fixture
def content() -> bytes:
    return random.Random(5).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "bytes.bin"
    path.write_bytes(content)
    return path


def refuse_direct(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """A file system that knows no reads past the page cache: it says so at once, or when read."""
    really_open, really_read = os.open, os.preadv
    direct: set[int] = set()

    def opened(name: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = really_open(name, flags, *arguments, **options)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read(descriptor: int, *arguments: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_read(descriptor, *arguments)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    range_file.warn_buffered.cache_clear()


def cut_reads(monkeypatch: pytest.MonkeyPatch, keep: Callable[[int], int]) -> None:
    """Reads that bring only so many of the bytes asked for."""
    really_read = os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        brought = really_read(descriptor, buffers, offset)
        return min(brought, keep(brought))

    monkeypatch.setattr(os, "preadv", read)


def random_ranges(count: int) -> list[tuple[int, int]]:
    rng = random.Random(6)
    ranges = []
    for _ in range(count):
        begin, end = sorted(rng.sample(range(SIZE + 1), 2))
        ranges.append((begin, end - begin))
    # Whole blocks, single bytes, the ends of the file.
    return [*ranges, (0, ALIGNMENT), (ALIGNMENT, 1), (ALIGNMENT - 1, 2), (SIZE - 1, 1), (0, SIZE)]


def ends_buffer() -> Tensor:
    return allocate_aligned(1, ENDS_BYTES)[0]


def uint8(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("way", ["direct", "blocks", "open", "read"])
@pytest.mark.parametrize("cut", ["whole", "cut"])
def test_ranges_are_the_files_bytes(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, way: str, cut: str
) -> None:
    if way in ("open", "read"):
        refuse_direct(monkeypatch, way)
    if way == "blocks":
        ask_for_blocks(monkeypatch)
    rng = random.Random(7)
    with RangeFile(path) as file:
        if cut == "cut":
            # Only the end of a file is shorter than a block.
            cut_reads(monkeypatch, lambda n: max(rng.randint(1, n), min(n, ALIGNMENT)))
        ends = ends_buffer()
        for offset, length in random_ranges(60):
            wanted = uint8(content[offset : offset + length])
            # Anywhere: neither end of what is filled is aligned, nor may its neighbours change.
            at = rng.choice([0, 8, 512, 4096, rng.randrange(1, 9000)])
            around = torch.full((at + length + 9,), 171, dtype=torch.uint8)
            assert file.read_scattered(offset, around[at : at + length], ends) >= length
            assert torch.equal(around[at : at + length], wanted)
            assert (around[:at] == 171).all() and (around[at + length :] == 171).all()

            start = offset // ALIGNMENT * ALIGNMENT
            length = min(length, SIZE - start)
            block = allocate_aligned(1, align(length))[0]
            assert file.read_aligned(start, length, block) >= length
            assert torch.equal(block[:length], uint8(content[start : start + length]))

            into = torch.empty(length, dtype=torch.uint8)
            file.read_into(start, into)
            assert torch.equal(into, uint8(content[start : start + length]))


def test_reads_cut_inside_a_block_go_on_from_its_start(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads_directly(path):
        pytest.skip("no direct reads here")
    with RangeFile(path) as file:
        cut_reads(monkeypatch, lambda n: n - 100 if n > ALIGNMENT else n)
        block = allocate_aligned(1, 4 * ALIGNMENT)[0]
        file.read_aligned(ALIGNMENT, 4 * ALIGNMENT, block)
    assert torch.equal(block, uint8(content[ALIGNMENT : 5 * ALIGNMENT]))


def test_bytes_read_are_whole_blocks(path: Path) -> None:
    if not reads_directly(path):
        pytest.skip("no direct reads here")
    with RangeFile(path) as file:
        for offset, length in random_ranges(30):
            first, last = offset // ALIGNMENT, -(-(offset + length) // ALIGNMENT)
            blocks = min(last * ALIGNMENT, SIZE) - first * ALIGNMENT
            out = torch.empty(length, dtype=torch.uint8)
            assert file.read_scattered(offset, out, ends_buffer()) == blocks


@pytest.mark.parametrize("way", ["direct", "open", "read"])
def test_the_page_cache_holds_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = tmp_path / "large.bin"
    size = 4 << 20
    with path.open("wb") as file:
        file.write(bytes(size))
        os.fsync(file.fileno())
    drop(path)
    path.read_bytes()
    assert cached_bytes(path) == size  # what is to be avoided can be seen
    drop(path)
    if cached_bytes(path):
        pytest.skip("this file system keeps its pages")
    if way != "direct":
        refuse_direct(monkeypatch, way)
    with RangeFile(path) as ranges:
        out = torch.empty(size // 2, dtype=torch.uint8)
        ranges.read_scattered(size // 4 + 11, out, ends_buffer())
    # Through the cache, the blocks that a range shares with its neighbours may stay.
    assert cached_bytes(path) <= (0 if way == "direct" else 2 * ALIGNMENT)


def test_a_file_system_without_direct_reads_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct(monkeypatch, "open")
    caplog.set_level(logging.WARNING, logger="speq")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            (tmp_path / folder / name).write_bytes(bytes(5000))
            with RangeFile(tmp_path / folder / name) as file:
                for _ in range(3):
                    file.read_aligned(0, 4096, allocate_aligned(1, 4096)[0])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert str(tmp_path / "one") in said[0] and "slower" in said[0]
    assert str(tmp_path / "two") in said[1]


def test_a_direct_open_that_fails_otherwise_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def opened(name: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_open(name, flags, *arguments)

    before = open_files(path.parent)
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(SpeqError, match=r"bytes\.bin cannot be read: Input/output error"):
        RangeFile(path)
    monkeypatch.undo()
    assert open_files(path.parent) == before


def test_a_read_that_fails_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RangeFile(path) as file:

        def read(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", read)
        with pytest.raises(
            SpeqError, match=r"reading 50 bytes at 4096 of .*bytes\.bin failed: Input/output error"
        ):
            file.read_aligned(4096, 50, allocate_aligned(1, 4096)[0])


@pytest.mark.parametrize("way", ["direct", "open"])
def test_a_file_that_ends_early_names_the_byte(
    path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way != "direct":
        refuse_direct(monkeypatch, way)
    with RangeFile(path) as file:
        os.truncate(path, 2 * ALIGNMENT + 10)
        message = rf"ended at byte {2 * ALIGNMENT + 10} while it was read; it held {SIZE} bytes"
        with pytest.raises(SpeqError, match=message):
            file.read_aligned(ALIGNMENT, 3 * ALIGNMENT, allocate_aligned(1, 3 * ALIGNMENT)[0])
        out = torch.empty(100, dtype=torch.uint8)
        with pytest.raises(SpeqError, match=message):
            file.read_scattered(2 * ALIGNMENT, out, ends_buffer())


@pytest.mark.parametrize("rows", [(1, 1), (3, 4096), (2, 5 << 20)])
def test_aligned_memory(rows: tuple[int, int]) -> None:
    made = allocate_aligned(*rows)
    assert made.shape == rows
    assert made.is_contiguous()
    assert made.data_ptr() % ALIGNMENT == 0
    made.fill_(7)


@pytest.mark.parametrize("rows", [(1, 4096), (3, 1 << 20)])
def test_freed_memory_is_taken_from_its_holders(rows: tuple[int, int]) -> None:
    made = allocate_aligned(*rows)
    made.fill_(7)
    view = made[-1:]
    free_memory(made)
    # What malloc gave is gone; what is mapped has fresh pages.
    assert made.untyped_storage().nbytes() == 0 or not view.any()


def test_without_o_direct_a_file_is_kept_out_of_the_cache(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS has it: no O_DIRECT, no advice, and F_NOCACHE."""
    told: list[tuple[str, int, int]] = []

    def control(descriptor: int, command: int, value: int) -> int:
        told.append((os.readlink(f"/proc/self/fd/{descriptor}"), command, value))
        return 0

    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    out = allocate_aligned(1, ALIGNMENT)[0]
    with RangeFile(path) as file:
        assert file.read_aligned(ALIGNMENT, 50, out) >= 50
    assert told == [(str(path), 48, 1)]
    assert bytes(out[:50].tolist()) == content[ALIGNMENT : ALIGNMENT + 50]
