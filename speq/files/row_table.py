"""Rows of a matrix that stays on disk: an n-gram table of tens of gigabytes, of which a token needs
a few hundred bytes.

Rows are read through the page cache. What texts repeat stays there as long as the system has room
for it, so it takes no memory that others ask for.
"""

import bisect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speq.errors import Broken
from speq.files.range_file import RangeFile

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
    """A table [N, width] in parts, one after another."""

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
        reads = zip(wanted.tolist(), found.view(torch.uint8), strict=True)
        if len(wanted) < FEW_ROWS:
            for row, into in reads:
                self._read(row, into)
        else:
            for _ in self._threads.map(lambda read: self._read(*read), reads):
                pass
        return found[places].view(*ids.shape, self.width)

    def close(self) -> None:
        self._threads.shutdown()
        for file in {part.file for part in self._parts}:
            file.close()

    def _read(self, row: int, into: Tensor) -> None:
        if not 0 <= row < self.rows:
            raise Broken(f"row {row} of a table of {self.rows} rows")
        at = bisect.bisect_right(self._ends, row)
        part = self._parts[at]
        first = self._ends[at] - part.rows
        part.file.read_kept(part.offset + (row - first) * into.nbytes, into)
