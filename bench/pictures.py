"""Pages with pictures that need nothing beside them, plotly's code included."""

import importlib.util
from pathlib import Path
from typing import Any

from speq.errors import SpeqError
from speq.files.atomic_file import check_target, write_whole


def check(path: Path, force: bool) -> None:
    """Refuse before minutes are spent measuring."""
    if importlib.util.find_spec("plotly") is None:
        raise SpeqError(
            "pictures are drawn by plotly, which is not installed; pip install 'speq[plots]'"
        )
    check_target(path, force)


def write(path: Path, figure: Any) -> None:
    """Write a plotly figure, whole or not at all. Raises SpeqError where that cannot be done."""
    page = figure.to_html(include_plotlyjs=True, full_html=True)
    write_whole(path, page.encode())
