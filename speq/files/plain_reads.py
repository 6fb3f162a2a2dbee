"""Plain reads of files past the page cache, by several threads: what a disk gives."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from torch import Tensor

from speq.errors import OptionError
from speq.files.alignment import allocate_aligned
from speq.files.atomic_file import create_locked, remove_abandoned
from speq.files.range_file import RangeFile
from speq.units import Clock, format_bytes

WRITE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Bytes and time of one measurement. payload_bytes: without the rest of whole blocks"""

    payload_bytes: int
    read_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.payload_bytes / self.seconds


def arena_for(rows: int, *sizes: int) -> Tensor:
    """Allocate rows as long as the longest read, and write to them: fresh memory is slower."""
    return allocate_aligned(rows, max(sizes)).zero_()


def plain_reads(
    paths: list[Path],
    size: int,
    arena: Tensor,
    readers: int,
    volume: int,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> LinkSample:
    """Read blocks of `size`, spread at random over files, into the first rows of `arena`."""
    files = [RangeFile(path) for path in paths]
    try:
        blocks = [(f, at) for f in files for at in range(0, f.size - size + 1, size)]
        if not blocks:
            raise OptionError(f"{paths[0]} is smaller than a read of {format_bytes(size)}")
        wanted = max(volume // size, readers)
        blocks = random.Random(seed).sample(blocks, min(wanted, len(blocks)))
        todo: SimpleQueue[tuple[RangeFile, int]] = SimpleQueue()
        for block in blocks:
            todo.put(block)
        failed: list[BaseException] = []

        def work(buffer: Tensor) -> None:
            try:
                while True:
                    file, at = todo.get_nowait()
                    file.read_aligned(at, size, buffer)
            except Empty:
                pass
            except BaseException as error:
                failed.append(error)

        buffers = arena[:readers, :size]
        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
        start_s = clock()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = clock() - start_s
        if failed:
            raise failed[0]
        return LinkSample(len(blocks) * size, len(blocks) * size, seconds)
    finally:
        for file in files:
            file.close()


@contextmanager
def scratch_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of about so many bytes that no disk compresses, on the disk and not in the page cache.

    Raises OSError where the folder's disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder, "probe")
    path = folder / f"probe.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        with create_locked(path) as file:
            for start in range(0, nbytes, WRITE_BYTES):
                file.write(os.urandom(min(WRITE_BYTES, nbytes - start)))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield path
    finally:
        path.unlink(missing_ok=True)


def bytes_per_s_of(folder: Path, nbytes: int, size: int, readers: int) -> float:
    """Rate of reads of `size` in a file of so many bytes, written for them.

    Raises OSError where the folder's disk has no room for it.
    """
    with scratch_file(folder, nbytes) as path:
        arena = arena_for(readers, size)
        return plain_reads([path], size, arena, readers, nbytes).bytes_per_s
