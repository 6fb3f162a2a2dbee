"""Files that are either whole or absent."""

import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from speq.errors import SpeqError
from speq.files.regular_file import check_regular

# What `replacing` names a file until it is whole: whose it is, and by which process and thread.
PARTIAL_NAME = re.compile(r"(.+)\.\d+-\d+\.partial")
ANOTHER_PLACE = "free some space, or choose another place"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes `path`'s place, flushed to the disk, when the block ends well.

    A link stays, and the file that it leads to is replaced. Whoever was killed here left a partial
    file that nobody holds locked: it goes now. Raises OSError, and leaves nothing behind, where the
    file cannot be written, and SpeqError where anything but a regular file is in its place.
    """
    if os.path.exists(path):  # asked of the link itself: /dev/stdout leads to no path
        check_regular(path, "choose another name")
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with _locked(partial) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(partial: Path) -> Iterator[BinaryIO]:
    """A new file to write, locked for as long as the block lasts."""
    while True:
        with partial.open("wb") as file:
            with suppress(OSError):  # a file system without locks: partial files stay there
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            # Another process may have taken it for abandoned before it was locked.
            if os.fstat(file.fileno()).st_nlink:
                yield file
                return


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove partial files in a folder that no process writes any more.

    name  of the file that they were to become; None: of any
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
    """Where a block that writes `path` raises OSError, raise SpeqError, which ends with `remedy`"""
    try:
        yield
    except OSError as error:
        raise SpeqError(f"{path} cannot be written: {error.strerror}; {remedy}") from error
    except ValueError as error:  # a path that no file can have
        if isinstance(error, SpeqError):
            raise
        raise SpeqError(f"{path} cannot be written: {error}; {remedy}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all. Raises SpeqError where that cannot be done."""
    with writing(path), replacing(path) as file:
        file.write(content)


def make_folder(path: Path) -> None:
    """A folder to write to, made if need be. Raises SpeqError where there can be none."""
    with writing(path, "choose another folder"):
        path.mkdir(parents=True, exist_ok=True)
        check_writable(path)


def check_writable(folder: Path) -> None:
    """Raise OSError unless files can be made in a folder: rights alone do not tell."""
    with TemporaryFile(dir=folder):
        pass


def check_target(path: Path | None, force: bool) -> None:
    """Refuse to overwrite before minutes are spent measuring.

    Only regular files are ever replaced, and those that links lead to.
    """
    if path is None:
        return
    exists = os.path.exists(path)  # asked of the link itself: /dev/stdout leads to no path
    if exists:
        check_regular(path, "choose another name")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a path that no file can have
        raise SpeqError(f"{path} cannot be written: {error}; choose another name") from error
    folder = next(parent for parent in target.parents if os.path.exists(parent))
    sentence = f"{path} cannot be written; choose a file in a folder of yours"
    if os.path.isdir(target) or not os.path.isdir(folder):
        raise SpeqError(sentence)
    try:
        check_writable(folder)
    except OSError as error:
        raise SpeqError(sentence) from error
    if exists and not force:
        raise SpeqError(f"{path} exists already; choose another name or add --force")
