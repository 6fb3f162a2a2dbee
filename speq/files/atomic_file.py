"""Atomic files, which are either complete or absent."""

import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from speq.errors import FileError, SpeqError
from speq.files.regular_file import check_regular

# Name of a file of `replacing` until it is complete: target name, process and thread.
PARTIAL_NAME = re.compile(r"(.+)\.\d+-\d+\.partial")
ANOTHER_PLACE = "free some space, or choose another place"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path`, synced to disk, when the block ends without an error.

    A link stays, and its target is replaced. Unlocked partial files of killed processes are
    removed. Raises OSError, and leaves nothing behind, if the file cannot be written, and SpeqError
    if its place is taken by anything but a regular file.
    """
    if os.path.exists(path):  # checked on the link itself: /dev/stdout leads to no path
        check_regular(path, "choose another name")
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with create_locked(partial) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def create_locked(partial: Path) -> Iterator[BinaryIO]:
    """Create a file, locked for the duration of the block."""
    while True:
        with partial.open("wb") as file:
            with suppress(OSError):  # a file system without locks: partial files remain
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            # Another process may have removed it as abandoned before it was locked.
            if os.fstat(file.fileno()).st_nlink:
                yield file
                return


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove partial files in a folder that no process is writing.

    name  name of the target file; None: any
    """
    try:
        found = os.listdir(folder)
    except OSError:
        return
    for each in found:
        match = PARTIAL_NAME.fullmatch(each)
        if match is not None and name in (None, match[1]):
            with suppress(OSError):  # locked, gone, or not ours to remove
                _remove_unlocked(folder / each)


def _remove_unlocked(partial: Path) -> None:
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink()
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str = ANOTHER_PLACE) -> Iterator[None]:
    """Turn an OSError of a block that writes `path` into a SpeqError that ends with `remedy`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}; {remedy}") from error
    except ValueError as error:  # a path that no file can have
        if isinstance(error, SpeqError):
            raise
        raise FileError(f"{path} cannot be written: {error}; {remedy}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises SpeqError if that fails."""
    with writing(path), replacing(path) as file:
        file.write(content)


def make_folder(path: Path) -> None:
    """Create a folder if it does not exist. Raises SpeqError if that fails."""
    with writing(path, "choose another folder"):
        path.mkdir(parents=True, exist_ok=True)
        check_writable(path)


def check_writable(folder: Path) -> None:
    """Raise OSError unless files can be created in a folder: permissions alone do not tell."""
    with TemporaryFile(dir=folder):
        pass


def check_target(path: Path | None, force: bool) -> None:
    """Raise SpeqError for a target that cannot or must not be written, before minutes of measuring.

    Only regular files, or targets of links to them, are ever replaced.
    """
    if path is None:
        return
    exists = os.path.exists(path)  # checked on the link itself: /dev/stdout leads to no path
    if exists:
        check_regular(path, "choose another name")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a path that no file can have
        raise FileError(f"{path} cannot be written: {error}; choose another name") from error
    folder = next(parent for parent in target.parents if os.path.exists(parent))
    sentence = f"{path} cannot be written; choose a file in a folder of yours"
    if os.path.isdir(target) or not os.path.isdir(folder):
        raise FileError(sentence)
    try:
        check_writable(folder)
    except OSError as error:
        raise FileError(sentence) from error
    if exists and not force:
        raise FileError(f"{path} exists already; choose another name or add --force")
