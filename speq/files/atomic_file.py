"""Files that are either whole or absent."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from speq.errors import SpeqError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes `path`'s place, flushed to the disk, when the block ends well.

    Raises OSError, and leaves nothing behind, where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_target(path: Path | None, force: bool) -> None:
    """Refuse to overwrite before minutes are spent measuring."""
    if path is None:
        return
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise SpeqError(f"{path} cannot be written; choose a file in a folder of yours")
    if os.path.exists(path) and not force:
        raise SpeqError(f"{path} exists already; choose another name or add --force")
