"""What was measured of machines, by key: one file in the user's cache folder, for some weeks."""

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from speq.errors import SpeqError
from speq.files.atomic_file import make_folder, write_whole
from speq.files.cache_folder import cache_folder
from speq.files.json_file import read_json
from speq.machine import is_recent

logger = logging.getLogger("speq")

NAME, FORMAT = "surveys.json", 1
# Of other disks, models and machines with the same home.
MAX_KEPT = 64
# Beyond any rate, and any time, of a machine.
MOST = 1e18

Made = TypeVar("Made")


def read(key: str, made_of: Callable[[dict[str, Any]], Made]) -> Made | None:
    """What is kept under a key and still holds; None where there is none, or a damaged one."""
    path = _path()
    if path is None:
        return None
    try:
        entry = _entries(path).get(key)
        if entry is None or not is_recent(float(entry["measured_at"])):
            return None
        return made_of(entry)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        logger.debug("%s in %s is made anew: %s", key, path, error)
        return None


def keep(key: str, entry: dict[str, Any], measured_at: float | None = None) -> None:
    """Keep an entry beside others; where that cannot be written, it is measured again.

    measured_at  seconds since 1970; None: now
    """
    path = _path()
    if path is None:
        return
    kept = _entries(path)
    kept.pop(key, None)
    kept[key] = entry | {"measured_at": time.time() if measured_at is None else measured_at}
    newest = dict([*kept.items()][-MAX_KEPT:])
    with contextlib.suppress(SpeqError):
        make_folder(path.parent)
        write_whole(path, json.dumps({"format": FORMAT, "surveys": newest}).encode())


def positive(value: Any) -> float:
    """A number above 0. Raises OverflowError, TypeError or ValueError for anything else."""
    number = float(value)
    if not 0 < number < MOST:
        raise ValueError(f"{number} is not above 0, or beyond any machine")
    return number


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """All entries; none where the file is damaged."""
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except SpeqError as error:
        logger.debug("%s is made anew: %s", path, error)
        return {}
    found = content.get("surveys") if content.get("format") == FORMAT else None
    return found if isinstance(found, dict) else {}


def _path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / NAME
