"""Strict reading of JSON: objects in files, and values in lines."""

import json
from pathlib import Path
from typing import Any

from speq.errors import FileError
from speq.files.regular_file import check_link, check_own, read_bytes

# Deeper than any config, and far below Python's recursion limit.
MAX_DEPTH = 64
# Ten times the index of the largest models.
MAX_BYTES = 256 << 20


def parse_json(content: str | bytes) -> Any:
    """Parse a JSON value. Raises ValueError, with a reason in one line, for anything else."""
    try:
        value = json.loads(content)
    except RecursionError:
        value, deep = None, True
    else:
        deep = _deeper_than(value, MAX_DEPTH)
    if deep:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def read_json(
    path: Path,
    remedy: str = "download it again",
    instead: str = "give the folder of a whole model",
) -> dict[str, Any]:
    """Read the object in a file. Raises SpeqError, naming the file, if there is none.

    remedy   what to do about a damaged file
    instead  what to do about one that cannot be read
    """
    check_link(path)
    content = read_bytes(path, instead, MAX_BYTES)
    check_own(path, content)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise FileError(f"{path} is not valid JSON: {error}; {remedy}") from error
    if not isinstance(value, dict):
        raise FileError(
            f"{path} holds a JSON {type(value).__name__}; it must hold an object: {remedy}"
        )
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
