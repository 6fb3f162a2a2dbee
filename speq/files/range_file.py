"""A file read by byte ranges, neither mapped nor left in the page cache.

Experts, which are read again and again, bypass the page cache (`O_DIRECT`): a cache outside the
budget would take memory that others need, and would falsify every measurement.
"""

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from speq.errors import Broken, FileError
from speq.files.alignment import ALIGNMENT, align, allocate_aligned
from speq.files.regular_file import check_regular

logger = logging.getLogger("speq")

SAMPLE_BYTES = 4096
# Bytes for the blocks at a range's ends: one before it, and two after it.
ENDS_BYTES = 3 * ALIGNMENT
WHOLE_FILE = "put the whole file there: download the model again, or pack it again"


def bytes_of(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous uint8 CPU tensor, which must outlive the view."""
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or not tensor.is_cpu:
        raise Broken(f"bytes are asked for of a tensor of {tensor.dtype} on {tensor.device}")
    # Not tensor.numpy(), which would keep the storage alive for ever.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read so many bytes of an open file, fewer only at its end: one read may bring fewer."""
    parts: list[bytes] = []
    while nbytes and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)


def drop_bytes(views: list[memoryview], start: int) -> list[memoryview]:
    """Drop the first `start` bytes of consecutive views."""
    rest = []
    for view in views:
        if len(view) > start:
            rest.append(view[start:])
        start = max(start - len(view), 0)
    return rest


@cache
def warn_buffered(folder: Path) -> None:
    """Warn that files are read through the page cache, once per folder."""
    logger.warning(
        "the file system of %s has no reads past the page cache: files are read through it, which "
        "is slower, and their pages are dropped afterwards",
        folder,
    )


class RangeFile:
    """An open file: its `size`, and thread-safe reads of byte ranges.

    Raises SpeqError, naming the file, if it is missing, unreadable or not regular.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._direct_fd = -1
        self._address_alignment = 0
        try:
            check_regular(path, WHOLE_FILE)
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._fd).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            if hasattr(fcntl, "F_NOCACHE"):  # macOS, which has no O_DIRECT
                fcntl.fcntl(self._fd, fcntl.F_NOCACHE, 1)
            self._direct_fd = self._open_direct()
            self._check()
        except OSError as error:
            self.close()
            raise FileError(f"{path} cannot be read: {error.strerror}; {WHOLE_FILE}") from error
        except BaseException:
            self.close()
            raise

    def _open_direct(self) -> int:
        """Open a descriptor for direct reads; -1 if they are not supported.

        Some file systems refuse the flag, others only the first read. Disks need addresses aligned
        to a few bytes (NVMe), a sector (most virtual ones), or a block.
        """
        if not hasattr(os, "O_DIRECT"):
            return -1
        descriptor, blocks = -1, allocate_aligned(2, ALIGNMENT).view(-1)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            for alignment in (ALIGNMENT, 512, 8):
                os.preadv(descriptor, [bytes_of(blocks)[alignment % ALIGNMENT :][:ALIGNMENT]], 0)
                self._address_alignment = alignment
        except OSError as error:
            refused = error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
            if refused and self._address_alignment:
                return descriptor
            if descriptor >= 0:
                os.close(descriptor)
            if not refused:
                raise
            return -1
        return descriptor

    def _check(self) -> None:
        """Check the file before it is used."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        descriptors = (self._fd, self._direct_fd)
        self._fd = self._direct_fd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def read_into(self, offset: int, out: Tensor) -> None:
        """Read into `out`, a contiguous uint8 CPU tensor, through the page cache; then drop the
        pages.
        """
        self._fill(self._fd, offset, [bytes_of(out)], out.nbytes)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, out.nbytes, os.POSIX_FADV_DONTNEED)

    def read_kept(self, offset: int, out: memoryview) -> None:
        """Read as `read_into`, and leave the pages where they are."""
        self._fill(self._fd, offset, [out], len(out))

    def read_cached(self, offset: int, out: memoryview) -> bool:
        """Read what the page cache holds, without waiting for a disk. False if it lacks a part of
        it, or the system cannot tell.
        """
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return os.preadv(self._fd, [out], offset, os.RWF_NOWAIT) == len(out)
        except OSError:  # read again, which says what is wrong
            return False

    def read_aligned(self, offset: int, nbytes: int, out: Tensor) -> int:
        """Read the first `nbytes` of `out` directly. Return the bytes read.

        offset, and the address and length of `out`, a contiguous uint8 CPU tensor, are multiples of
        ALIGNMENT. Bytes of `out` after nbytes are undefined.
        """
        if offset % ALIGNMENT or out.data_ptr() % ALIGNMENT or out.nbytes < align(nbytes):
            raise Broken(f"{nbytes} bytes at {offset} of {self.path} are to be read out of line")
        if self._direct_fd < 0:
            return self._read_buffered(offset, out[:nbytes])
        return self._fill(self._direct_fd, offset, [bytes_of(out)[: align(nbytes)]], nbytes)

    def read_scattered(self, offset: int, out: Tensor, ends: Tensor) -> int:
        """Read into unaligned `out` directly. Return the bytes read.

        Blocks inside the range are read in place, or as close as alignment allows, and then moved.
        The blocks at both ends go through `ends`, ENDS_BYTES of aligned memory. They include
        neighbouring bytes, so more is read than `out` takes.
        """
        if self._direct_fd < 0:
            return self._read_buffered(offset, out)
        end = offset + out.nbytes
        first = min(align(offset), end)
        place = out.data_ptr() + first - offset
        shift = -place % self._address_alignment
        # Reads must not reach past `out`: the memory after it is not ours.
        inside = max(end - first - shift, 0) // ALIGNMENT * ALIGNMENT
        before = -(-(first - offset) // ALIGNMENT) * ALIGNMENT
        start = offset // ALIGNMENT * ALIGNMENT
        after = align(end) - (start + before + inside)
        sides = bytes_of(ends)
        views = [
            sides[:before],
            bytes_of(out)[first - offset + shift :][:inside],
            sides[before : before + after],
        ]
        read_bytes = self._fill(self._direct_fd, start, [v for v in views if v], end - start)
        # Not torch's copy, which would start threads beside the reading one, nor a memoryview's,
        # which would hold the GIL.
        if shift:
            ctypes.memmove(place, place + shift, inside)
        ctypes.memmove(out.data_ptr(), ends.data_ptr() + offset - start, first - offset)
        ctypes.memmove(place + inside, ends.data_ptr() + before, end - first - inside)
        return read_bytes

    def _read_buffered(self, offset: int, out: Tensor) -> int:
        warn_buffered(self.path.parent)
        self.read_into(offset, out)
        return out.nbytes

    def _fill(self, descriptor: int, offset: int, views: list[memoryview], wanted: int) -> int:
        """Read into one view after another until they have at least `wanted` bytes."""
        done = start = 0
        while done < wanted:
            try:
                count = os.preadv(descriptor, drop_bytes(views, start), offset + start)
            except OSError as error:
                raise FileError(
                    f"reading {wanted} bytes at {offset} of {self.path} failed: {error.strerror}; "
                    "check the disk and run again"
                ) from error
            if start + count <= done:
                raise FileError(
                    f"{self.path} ended at byte {offset + done} while it was read; it held "
                    f"{self.size} bytes when it was opened: {WHOLE_FILE}"
                )
            done = start + count
            # A direct read continues at a block's start: a partial block is read again.
            start = done if descriptor == self._fd else done - done % ALIGNMENT
        return done

    def stamp(self) -> list[str | int]:
        """Stamp that changes when the file is written, touched, replaced or moved: its real path,
        inode, size and times (ns) of the last change. It describes the open file, whatever its name
        now leads to.
        """
        at = os.fstat(self._fd)
        real = os.path.realpath(self.path)
        return [real, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]

    def samples(self, count: int) -> Iterator[bytes]:
        """Up to `count` blocks of 4 KiB spread evenly over the file."""
        last = max(self.size - SAMPLE_BYTES, 0)
        for offset in sorted({last * i // max(count - 1, 1) for i in range(count)}):
            yield read_at(self._fd, SAMPLE_BYTES, offset)
