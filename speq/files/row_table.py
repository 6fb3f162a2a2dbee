"""Rows of a matrix that stays on disk: an n-gram table of tens of gigabytes, of which a token needs
a few hundred bytes.

Rows are read through the page cache. What texts repeat stays there as long as the system has room
for it, so it takes no memory that others ask for.
"""

import bisect
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speq.errors import Broken
from speq.files.range_file import RangeFile, bytes_of

# Reads in flight: a disk serves so many at a time in little more time than one.
THREADS = 16
# Fewer rows than this are read by the caller: they take less time than waking threads.
FEW_ROWS = 4


class TablePart(NamedTuple):
    """Consecutive rows of a table: a tensor [rows, width] of a file."""

    file: RangeFile
    offset: int
    rows: int


class RowTable:
    """A table [N, width] in parts, one after another, whose files others close."""

    def __init__(self, parts: Sequence[TablePart], width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self._parts = parts
        self._ends = [*accumulate(part.rows for part in parts)]
        self._threads = ThreadPoolExecutor(THREADS, "speq-table")

    @property
    def rows(self) -> int:
        return self._ends[-1]

    def read(self, ids: Tensor) -> Tensor:
        """Read the rows of ids [...]: [..., width]. Raises SpeqError where a read fails."""
        wanted, places = ids.flatten().unique(return_inverse=True)
        found = torch.empty(len(wanted), self.width, dtype=self.dtype)
        row_bytes = self.width * self.dtype.itemsize
        views, left = bytes_of(found.view(-1).view(torch.uint8)), []
        for at, row in enumerate(wanted.tolist()):
            file, offset = self._place(row, row_bytes)
            into = views[at * row_bytes : (at + 1) * row_bytes]
            if not file.read_cached(offset, into):
                left.append((file, offset, into))

        def read_share(at: int) -> Tensor:
            read_all(left[at::THREADS])
            return found  # which must outlive the reads, also if another one fails

        if len(left) < FEW_ROWS:
            read_all(left)
        else:
            try:
                for _ in self._threads.map(read_share, range(THREADS)):
                    pass
            except RuntimeError:  # no thread can begin, or the interpreter ends
                read_all(left)
        return found[places].view(*ids.shape, self.width)

    def close(self) -> None:
        self._threads.shutdown()

    def _place(self, row: int, row_bytes: int) -> tuple[RangeFile, int]:
        """The file of a row, and its offset there."""
        if not 0 <= row < self.rows:
            raise Broken(f"row {row} of a table of {self.rows} rows")
        at = bisect.bisect_right(self._ends, row)
        part = self._parts[at]
        first = self._ends[at] - part.rows
        return part.file, part.offset + (row - first) * row_bytes


def read_all(reads: Iterable[tuple[RangeFile, int, memoryview]]) -> None:
    """Read from each file at an offset."""
    for file, offset, into in reads:
        file.read_kept(offset, into)
