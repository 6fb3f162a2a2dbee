"""What must hold of every picture."""

import re
from collections.abc import Iterator
from typing import Any

from speq.dashboard.panel import COLOURS, Panel


def strings(value: Any) -> Iterator[str]:
    """Every text within a figure, wherever it stands."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)


def mark(trace: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a series from others without its colour."""
    marker = trace.get("marker", {})
    pattern = marker.get("pattern", {}).get("shape", "")
    dash = trace.get("line", {}).get("dash", "solid") if "lines" in trace.get("mode", "") else None
    return trace["type"], pattern, dash, marker.get("symbol")


def check(panel: Panel) -> None:
    """Names, aid, axes with titles, colours of the theme, a table that fits, series told apart."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", panel.name)
    assert panel.title and panel.aid.endswith("."), panel.name
    assert bool(panel.absent) != bool(panel.data or panel.frames), panel.name
    assert not panel.absent or panel.absent.endswith(".")
    for name, axis in panel.layout.items():
        if re.fullmatch(r"[xy]axis\d*", name):
            assert axis["title"]["text"], (panel.name, name)
    assert {"xaxis", "yaxis"} <= set(panel.layout)
    used = {text for text in strings([panel.data, panel.layout]) if text.startswith("@")}
    assert used <= {f"@{name}" for name in COLOURS}, panel.name
    assert all(len(row) == len(panel.table.columns) for row in panel.table.rows), panel.name
    if panel.data:
        assert panel.table.rows, panel.name
    named = [trace for trace in panel.data if trace.get("showlegend", True) and "name" in trace]
    assert len({mark(trace) for trace in named}) == len(named), panel.name
