"""JSON files that hold an object."""

import json
from pathlib import Path
from typing import Any

from speq.errors import SpeqError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises SpeqError, naming the file, where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpeqError(
            f"{path} cannot be read: {error.strerror}; give the folder of a whole model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpeqError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise SpeqError(f"{path} holds a JSON {type(content).__name__}; it must hold an object")
    return content
