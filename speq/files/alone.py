"""Locks on folders that one process at a time may write to."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speq.errors import FileError


class FolderTaken(FileError):
    """Another process is writing to the folder."""

    code = "folder_taken"


@contextmanager
def lock_folder(folder: Path, sentence: str) -> Iterator[None]:
    """Lock a folder inside the block. Raise Taken with this sentence if another process, or another
    block of this one, has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FolderTaken(sentence) from error
        yield
    finally:
        os.close(descriptor)
