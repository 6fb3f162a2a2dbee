"""A panel from series of figures: bars, points or lines that differ by more than their colour."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from speq.dashboard.bench_panels.rows import Column, Row, distinct
from speq.dashboard.panel import Panel, Table

# Bars side by side, bars one on top of the other, points side by side, points that lines join.
Mark = Literal["bars", "stack", "points", "lines"]
COLOURS = 8
PATTERNS = ("", "/", "x", "-", ".", "\\", "|", "+")
SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down"),
    *("pentagon", "hourglass", "bowtie", "hexagon"),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Figures that differ by as much are drawn on a scale of powers.
LOG_FROM = 10.0
POINT_PX = 10
ALLOWED = frozenset(string.ascii_lowercase + string.digits)
Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """Figures over what they are of. low, high: where bars of error end; None: there are none."""

    name: str
    x: list[Any]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    colour: str | None = None


def by_name(
    rows: Sequence[Row],
    across: Column,
    name: Column,
    figure: Column,
    low: Column | None = None,
    high: Column | None = None,
) -> list[Series]:
    """A series for each name that rows have, of one of their figures."""
    found = []
    for each in distinct(rows, name.key):
        mine = [row for row in rows if row[name.key] == each]

        def of(column: Column, mine: list[Row] = mine) -> list[Any]:
            return [row[column.key] for row in mine]

        ends = (None if low is None else of(low), None if high is None else of(high))
        found.append(Series(str(each), of(across), of(figure), *ends))
    return found


def by_figure(
    rows: Sequence[Row], across: Column, figures: Sequence[tuple[str, Column, str | None]]
) -> list[Series]:
    """A series for each figure: its name, its column and its colour, if it has one of its own."""
    x = [row[across.key] for row in rows]
    return [
        Series(name, x, [row[column.key] for row in rows], colour=colour)
        for name, column, colour in figures
    ]


def picture(
    name: str,
    title: str,
    aid: str,
    series: Sequence[Series],
    mark: Mark,
    axes: tuple[str, str],
    table: Table,
    missing: str = "",
) -> Panel:
    """A panel of series. Those without a figure are left out; all others look as they do in other
    panels of the same names.

    axes     titles of both, with units
    missing  what is said where no series has a figure; by default that the file has none
    """
    x_title, y_title = axes
    values = [value for each in series for value in each.y if value is not None]
    if not values:
        said = missing or f"The file has no figures of this kind: {y_title}."
        return Panel(name, title, aid, [], {}, table, absent=said)
    vertical = axis(y_title)
    if mark in ("points", "lines"):
        vertical = log_axis(y_title) if far_apart(values) else vertical | {"rangemode": "tozero"}
    places = [place for each in series for place in each.x]
    numeric = mark == "lines" and not any(isinstance(place, str) for place in places)
    horizontal = axis(x_title, type="linear" if numeric else "category")
    drawn = [
        _trace(at, each, mark, numeric)
        for at, each in enumerate(series)
        if any(value is not None for value in each.y)
    ]
    layout: dict[str, Any] = {
        "xaxis": horizontal,
        "yaxis": vertical,
        "showlegend": len(drawn) > 1,
    }
    if mark == "points":
        layout["scattermode"] = "group"
    elif mark != "lines":
        layout["barmode"] = "stack" if mark == "stack" else "group"
    return Panel(name, title, aid, drawn, layout, table)


def heat_map(
    name: str,
    title: str,
    aid: str,
    trace: Trace,
    axes: tuple[str, str],
    table: Table,
    **vertical: Any,
) -> Panel:
    """A panel of cells in the page's own colours. trace: x, y, z, and what else it takes."""
    layout = {"xaxis": axis(axes[0]), "yaxis": axis(axes[1], **vertical)}
    return Panel(name, title, aid, [{"type": "heatmap"} | trace], layout, table)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | more


def log_axis(title: str) -> dict[str, Any]:
    return axis(f"{title} (log scale)", type="log", dtick="D2")


def far_apart(values: Sequence[float]) -> bool:
    """Whether a scale from zero would hide the small ones."""
    return min(values) > 0 and max(values) >= LOG_FROM * min(values)


def category(place: Any) -> str:
    """What stands at a place of an axis of names."""
    return f"{place:g}" if isinstance(place, float) else str(place)


def slug(text: Any) -> str:
    """Of any text, what may stand in a panel's name: small letters, digits and hyphens."""
    kept = "".join(each if each in ALLOWED else "-" for each in str(text).lower())
    return "-".join(filter(None, kept.split("-"))) or "unnamed"


def _trace(at: int, series: Series, mark: Mark, numeric: bool) -> Trace:
    colour = series.colour or f"@{at % COLOURS + 1}"
    x = series.x if numeric else [category(place) for place in series.x]
    trace: Trace = {"name": series.name, "x": x, "y": series.y}
    if mark in ("bars", "stack"):
        # A second round of patterns is denser than the first.
        solidity = 0.3 if at < len(PATTERNS) else 0.6
        pattern = {"shape": PATTERNS[at % len(PATTERNS)], "solidity": solidity}
        return trace | {"type": "bar", "marker": {"color": colour, "pattern": pattern}}
    symbol = SYMBOLS[at % len(SYMBOLS)]
    trace |= {"type": "scatter", "marker": {"color": colour, "symbol": symbol, "size": POINT_PX}}
    if mark == "points":
        trace |= {"mode": "markers", "offsetgroup": series.name}
    else:
        # A second round of symbols has each with another dash.
        dash = DASHES[(at + at // len(SYMBOLS)) % len(DASHES)]
        trace |= {"mode": "lines+markers", "line": {"color": colour, "dash": dash}}
    if series.low is not None or series.high is not None:
        trace["error_y"] = _error_bars(series, colour)
    return trace


def _error_bars(series: Series, colour: str) -> Trace:
    """From each figure up and down to its ends; nothing where an end is not known."""

    def lengths(ends: list[float | None] | None, sign: int) -> list[float]:
        return [
            0.0 if value is None or end is None else max(sign * (end - value), 0.0)
            for value, end in zip(series.y, ends or [None] * len(series.y), strict=True)
        ]

    up, down = lengths(series.high, 1), lengths(series.low, -1)
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": colour}
