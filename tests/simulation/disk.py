"""A disk whose reads fail, come short or bring other bytes when a schedule says so."""

import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FAULTS = ("error", "short", "end", "rot")


class SimulatedDisk:
    """Faults of the reads of files, in this process.

    struck  reads that failed so far, "short" ones excepted: these go on
    """

    def __init__(self) -> None:
        self._read = os.preadv
        self.rng = random.Random(0)
        self._fault = ""
        self._skipped = self._left = 0
        self.struck = 0

    def plan(self, fault: str, skipped: int, count: int) -> None:
        """Let `skipped` reads pass, and strike the `count` that follow."""
        self._fault, self._skipped, self._left = fault, skipped, count

    @property
    def silent(self) -> bool:
        """True where reads are about to bring other bytes."""
        return self._left > 0 and self._fault == "rot"

    def calm(self) -> None:
        self._left = 0

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if not self._left or self._skipped:
            self._skipped = max(self._skipped - 1, 0)
            return self._read(descriptor, views, offset)
        self._left -= 1
        if self._fault == "short":
            whole = sum(map(len, views))
            # A disk reads whole blocks.
            half = max(whole // 2 // 4096 * 4096, min(whole, 4096))
            return self._read(descriptor, list(cut(views, half)), offset)
        self.struck += 1
        if self._fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._fault == "end":
            return 0
        count = self._read(descriptor, views, offset)
        longest = max(views, key=len)
        for _ in range(3):
            at = self.rng.randrange(min(len(longest), count))
            flipped = longest[at : at + 1]
            flipped[0:1] = bytes([flipped[0] ^ (1 << self.rng.randrange(8))])
        return count

    @contextmanager
    def mounted(self) -> Iterator[None]:
        os.preadv = self.preadv  # type: ignore[assignment]
        try:
            yield
        finally:
            os.preadv = self._read


def cut(views: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    for view in views:
        if nbytes > 0:
            yield view[:nbytes]
        nbytes -= len(view)
