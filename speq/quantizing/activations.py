"""Rows of activations, one per token, in memory or in a file."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from speq.errors import FileError
from speq.files.checksums import SummedFile
from speq.files.range_file import bytes_of

# Rows moved between a file and memory at a time.
BLOCK_ROWS = 1024


class ActivationRows(Protocol):
    """Rows of activations [R, W] of one dtype."""

    def read(self, start: int, count: int) -> Tensor:
        """Read rows from `start` on; a view if they are in memory."""

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite rows from `start` on."""

    def gather(self, index: Tensor) -> Tensor:
        """Gather the rows of an ascending index [N] int64."""

    def add(self, index: Tensor, values: Tensor) -> None:
        """Add values [N, W] to the rows of an ascending index without duplicates."""

    def close(self) -> None:
        """Free the rows."""


class MemoryRows:
    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self._values = torch.zeros(rows, width, dtype=dtype)

    def read(self, start: int, count: int) -> Tensor:
        return self._values[start : start + count]

    def write(self, start: int, values: Tensor) -> None:
        self._values[start : start + len(values)] = values

    def gather(self, index: Tensor) -> Tensor:
        return self._values[index]

    def add(self, index: Tensor, values: Tensor) -> None:
        self._values.index_add_(0, index, values)

    def close(self) -> None:
        self._values = self._values[:0].clone()


class FileRows:
    """Rows in a file, which replaces an existing one. Raises OSError."""

    def __init__(self, path: Path, rows: int, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._row_bytes = width * dtype.itemsize
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self._fd = os.open(path, flags, 0o666)
        os.ftruncate(self._fd, rows * self._row_bytes)

    def read(self, start: int, count: int) -> Tensor:
        values = torch.empty(count, self._width, dtype=self._dtype)
        self._transfer(start, values, writing=False)
        return values

    def write(self, start: int, values: Tensor) -> None:
        self._transfer(start, values.to(self._dtype).contiguous(), writing=True)

    def gather(self, index: Tensor) -> Tensor:
        values = torch.empty(len(index), self._width, dtype=self._dtype)
        for at, start, count in runs(index):
            self._transfer(start, values[at : at + count], writing=False)
        return values

    def add(self, index: Tensor, values: Tensor) -> None:
        sums = self.gather(index).add_(values)
        for at, start, count in runs(index):
            self._transfer(start, sums[at : at + count], writing=True)

    def _transfer(self, start: int, values: Tensor, writing: bool) -> None:
        """Move rows between the file, from row `start` on, and contiguous memory."""
        view, offset = bytes_of(values.view(-1).view(torch.uint8)), start * self._row_bytes
        done = 0
        while done < len(view):
            move = os.pwritev if writing else os.preadv
            count = move(self._fd, [view[done:]], offset + done)
            if not count:
                raise FileError(
                    "a file of activations became shorter while it was read; run the same "
                    "command again"
                )
            done += count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (place in the index, first row, rows) of each run of consecutive rows."""
    if not len(index):
        return
    cuts = (torch.where(index.diff() != 1)[0] + 1).tolist()
    for begin, end in zip([0, *cuts], [*cuts, len(index)], strict=True):
        yield begin, int(index[begin]), end - begin


def save(rows: ActivationRows, count: int, path: Path) -> int:
    """Write `count` float32 rows to a file and sync it. Return their CRC-32.

    Raises OSError.
    """
    with path.open("wb") as file:
        summed = SummedFile(file)
        for start in range(0, count, BLOCK_ROWS):
            block = rows.read(start, min(BLOCK_ROWS, count - start))
            summed.write(bytes_of(block.contiguous().view(-1).view(torch.uint8)))
        file.flush()
        os.fsync(file.fileno())
    return summed.crc32


def load(rows: ActivationRows, count: int, width: int, path: Path) -> None:
    """Fill `count` float32 rows from a file. Raises SpeqError if it holds anything else."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != count * width * 4:
                raise FileError(
                    f"{path} does not hold the {count} rows that were journalled; remove "
                    f"{path.parent} and quantise again"
                )
            for start in range(0, count, BLOCK_ROWS):
                block = torch.empty(min(BLOCK_ROWS, count - start), width)
                file.readinto(bytes_of(block.view(-1).view(torch.uint8)))
                rows.write(start, block)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read: {error.strerror}; remove {path.parent} and quantise again"
        ) from error
