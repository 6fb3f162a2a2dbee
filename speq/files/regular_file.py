"""Checks for files that open without blocking: regular ones, and links to them."""

import os
import stat
from fnmatch import fnmatch
from pathlib import Path

from speq.errors import FileError, SpeqError
from speq.units import format_bytes

KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


# Shorter keys can be guessed.
LEAST_CHARACTERS = 16
# Placeholders in place of a file, by their first bytes, and what to do.
PAGE = (
    "a page of HTML, such as a site shows in its place",
    "download it by the address of the file itself, logged in where the model asks for that",
)
STAND_INS = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer to it, as a clone without Git LFS leaves",
        "run `git lfs pull` in its folder, or download it",
    ),
    (b"<!doctype html", *PAGE),
    (b"<html", *PAGE),
)


def check_regular(path: Path, remedy: str = "put the file itself there") -> None:
    """Raise SpeqError for a pipe, a socket or a device, whose opening or reading might never end.

    A folder passes, since opening it fails with a reason. Raises OSError if nothing is there.
    """
    mode = os.stat(path).st_mode
    for is_kind, name in KINDS:
        if is_kind(mode):
            raise FileError(f"{path} is {name} and must be a regular file; {remedy}")


def check_own(path: Path, beginning: bytes) -> None:
    """Raise SpeqError if a file is a placeholder by its first bytes."""
    text = beginning[:80].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for known, what, remedy in STAND_INS:
        if text.startswith(known):
            raise FileError(f"{path} is not the file itself but {what}; {remedy}")


def check_link(path: Path) -> None:
    """Raise SpeqError for a link whose target is gone, as one into a hub cache that was emptied."""
    if os.path.islink(path) and not os.path.exists(path):
        raise FileError(
            f"{path} is a link to {os.readlink(path)}, which is gone; download the model again"
        )


def read_bytes(path: Path, remedy: str, max_bytes: int | None = None) -> bytes:
    """Read all bytes of a regular file. Raises SpeqError that ends with `remedy` otherwise."""
    try:
        check_regular(path, remedy)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if max_bytes is not None and size > max_bytes:
                raise FileError(
                    f"{path} has {format_bytes(size)} and is read up to "
                    f"{format_bytes(max_bytes)}; {remedy}"
                )
            return file.read()
    except (OSError, ValueError) as error:
        if isinstance(error, SpeqError):
            raise
        # A ValueError means an impossible path.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"{path} cannot be read: {reason}; {remedy}") from error


def read_text(path: Path, remedy: str, max_bytes: int | None = None) -> str:
    """Read a regular UTF-8 file. Raises SpeqError that ends with `remedy` otherwise."""
    try:
        return read_bytes(path, remedy, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read: it is not UTF-8 ({error}); {remedy}") from error


def check_folder(folder: Path, max_bytes: dict[str, int]) -> None:
    """Raise SpeqError for files on which a library that reads the folder would hang or exhaust
    memory.

    max_bytes  largest size of files, by name pattern; others are not checked

    A file must be regular and no larger than its pattern allows.
    """
    for name in sorted(os.listdir(folder)):
        limits = [limit for pattern, limit in max_bytes.items() if fnmatch(name, pattern)]
        path = folder / name
        if not limits:
            continue
        check_link(path)
        check_regular(path, "download the model again")
        size = os.path.getsize(path)
        if size > min(limits):
            raise FileError(
                f"{path} has {format_bytes(size)} and files of its kind at most "
                f"{format_bytes(min(limits))}; download the model again, or give another one"
            )


def read_keys(path: Path) -> list[str]:
    """Read a file with a secret key in each line, one at least.

    Raises SpeqError for any other file, and for one that others may read.
    """
    wanted = f"write a key of {LEAST_CHARACTERS} characters or more in each line"
    lines = [line.strip() for line in read_text(path, wanted).splitlines()]
    check_private(path)
    keys = [line for line in lines if line]
    if not keys:
        raise FileError(f"{path} holds no key; {wanted}")
    for number, line in enumerate(lines, start=1):
        if line and (len(line) < LEAST_CHARACTERS or not line.isascii() or " " in line):
            # Without the key: logs are no place for it.
            raise FileError(
                f"{path}:{number} is no key of {LEAST_CHARACTERS} or more ASCII characters "
                f"without spaces; {wanted}"
            )
    return keys


def check_private(path: Path) -> None:
    """Raise SpeqError for a file of whoever runs this that others may read or change.

    It is OpenSSH's rule for private keys. A file of another owner, as a system's secrets have, is
    as that owner wants it.
    """
    status = os.stat(path)
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        raise FileError(
            f"{path} may be read or changed by other users (its mode is "
            f"{stat.S_IMODE(status.st_mode):04o}), and it holds keys; run `chmod 600 {path}`"
        )
