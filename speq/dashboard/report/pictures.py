"""Panels of a bench's JSON: the pictures that it declares, of its rows.

Series differ by more than their colour: by a pattern, a dash or a symbol.
"""

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

from speq.dashboard.panel import Cell, Panel, Table
from speq.errors import FileError, SpeqError
from speq.measure.picture import BUDGET, TPOT, Axis, Mark, Picture

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
# Beyond any figure; what is not a number is not within it either.
MOST = 1e100
SHOWN_CHARACTERS = 60
Row = dict[str, Any]
Trace = dict[str, Any]


def _default(x: str, by: str, key: str = TPOT.key, title: str = TPOT.title) -> Picture:
    names = tuple(Axis(name, name.replace("_", " ")) for name in by.split())
    below = BUDGET if x == BUDGET.key else Axis(x, x.replace("_", " "))
    return Picture(slug(key), title.partition(",")[0], (below,), (Axis(key, title),), names)


def slug(text: Any) -> str:
    """Any text as it may stand in a panel's name: small letters, digits and hyphens."""
    kept = "".join(each if each in ALLOWED else "-" for each in str(text).lower())
    return "-".join(filter(None, kept.split("-"))) or "unnamed"


# Pictures of files that declare none, by what their bench calls itself: those of older versions.
DEFAULTS = {
    "ablation": _default("without", ""),
    "batch": _default("texts", "draft_length", "tokens_per_s", "tokens a second"),
    "drafters": _default("budget", "drafter temperature"),
    "equal-memory": _default("f", "system part"),
    "governor": _default("budget", "kind draft_length"),
    "hit-rate": _default("slots", "policy", "coverage_in_time", "share that was there in time"),
    "kernels": _default("T", "shape kernel", "bandwidth_share", "share of a plain read's speed"),
    "schedule": _default("fraction", "system"),
    "tpot": _default("budget", "draft_length neighbours variant"),
    "tpot-systems": _default("budget", "system"),
    "transfer": _default("readers", "store kind request_bytes", "gb_per_s", "speed, GB/s"),
}


def panels_of(report: Row) -> list[Panel]:
    """Every picture that a report declares, or its rows as a table.

    Raises SpeqError, naming the place, for what cannot be drawn.
    """
    declared = report.get("pictures") or []
    if not isinstance(declared, list):
        raise wrong("pictures", declared, "a list of objects")
    pictures = [_picture(f"pictures[{at}]", each) for at, each in enumerate(declared)]
    if not pictures and report["bench"] in DEFAULTS:
        pictures = [DEFAULTS[report["bench"]]]
    found = [panel for picture in pictures for panel in _panels(picture, report)]
    return found or [_table_alone(report)]


def _picture(place: str, declared: Any) -> Picture:
    try:
        axes = {
            name: tuple(Axis(**axis) for axis in declared.get(name, ()))
            for name in ("x", "y", "by")
        }
        picture = Picture(**declared | axes)
        names = [picture.name, picture.title, picture.low, picture.high, picture.aid]
        names += [picture.without, picture.each, picture.rows]
        names += [text for axis in _axes(picture) for text in (axis.key, axis.title)]
        numbers = [axis.scale for axis in _axes(picture)]
        known = picture.mark in get_args(Mark) and picture.x and picture.y
        if known and all(isinstance(name, str) for name in names) and all(map(is_number, numbers)):
            return picture
    except (TypeError, AttributeError, ValueError):
        pass
    raise wrong(place, declared, "a picture as benches declare them")


def _axes(picture: Picture) -> tuple[Axis, ...]:
    return (*picture.x, *picture.by, *picture.y)


def _panels(picture: Picture, report: Row) -> list[Panel]:
    """A panel, or one for each value of `each`. A list that may be absent has none."""
    rows = report.get(picture.rows)
    if rows in (None, []) and picture.rows != "rows":
        return []
    places = (*picture.x, *picture.by)
    found: dict[str, list[Row]] = {}
    for at, row in enumerate(rows_of(report, picture.rows)):
        figures = _figures(f"{picture.rows}[{at}]", row, picture)
        if not picture.without or picture.without not in [row.get(axis.key) for axis in places]:
            found.setdefault(str(row.get(picture.each)) if picture.each else "", []).append(figures)
    return [_panel(picture, figures, value) for value, figures in found.items()]


def rows_of(report: Row, name: str = "rows") -> list[Row]:
    """A list of objects in a report. Raises SpeqError where it is none, or empty."""
    found = report.get(name)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise wrong(name, found, "a list of objects")
    if not found:
        raise FileError(f"{name} is an empty list, and there is nothing to draw; measure again")
    return found


def _figures(place: str, row: Row, picture: Picture) -> Row:
    """The values of a row that a picture shows, in its units."""
    found: Row = {}
    for axis in (*picture.x, *picture.by):
        value = row.get(axis.key)
        if value is not None and not isinstance(value, str | bool) and not is_number(value):
            raise wrong(f"{place}.{axis.key}", value, "a name or a number")
        if value is not None and is_number(value) and axis.scale != 1.0:
            value *= axis.scale
        found[axis.key] = value
    ends = [Axis(key, "", picture.y[0].scale) for key in (picture.low, picture.high) if key]
    for axis in (*picture.y, *ends):
        value = row.get(axis.key)
        if value is not None and not is_number(value):
            raise wrong(f"{place}.{axis.key}", value, "a number")
        found[axis.key] = value
        if value is not None and axis.scale != 1.0:
            found[axis.key] = value * axis.scale
    return found


@dataclass(frozen=True, slots=True)
class Series:
    """Figures over what they are of. low, high: where error bars end; None: there are none."""

    name: str
    x: list[Any]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


def _series(picture: Picture, rows: Sequence[Row]) -> list[Series]:
    """One for each combination of names that rows have, and for each figure."""
    differing = [axis for axis in picture.by if len({row[axis.key] for row in rows}) > 1]
    found = []
    for names in dict.fromkeys(tuple(row[axis.key] for axis in differing) for row in rows):
        mine = [row for row in rows if tuple(row[axis.key] for axis in differing) == names]
        if picture.mark == "lines" and _numeric(picture, mine):
            mine = sorted(mine, key=lambda row: float(row[picture.x[0].key]))
        for figure in picture.y:
            parts = [_named(axis, name) for axis, name in zip(differing, names, strict=True)]
            parts += [figure.title.partition(",")[0]] if len(picture.y) > 1 or not parts else []
            ends = [
                [row[key] for row in mine] if key else None for key in (picture.low, picture.high)
            ]
            x, y = [_place(picture, row) for row in mine], [row[figure.key] for row in mine]
            found.append(Series(", ".join(parts), x, y, *ends))
    return found


def _named(axis: Axis, value: Any) -> str:
    if is_number(value):
        return f"{axis.title} {value:g}"
    if isinstance(value, str) and value.isdecimal():
        return f"{axis.title} {value}"  # of an option that takes names as well
    return str(value or f"no {axis.title}")


def _numeric(picture: Picture, rows: Sequence[Row]) -> bool:
    """True if places lie along a scale."""
    return len(picture.x) == 1 and all(is_number(row[picture.x[0].key]) for row in rows)


def _place(picture: Picture, row: Row) -> Any:
    values = [row[axis.key] for axis in picture.x]
    return values[0] if len(values) == 1 else ", ".join(map(category, values))


def category(place: Any) -> str:
    """The name of a place on an axis of names."""
    return f"{place:g}" if isinstance(place, float) else str(place)


def _panel(picture: Picture, rows: Sequence[Row], value: str = "") -> Panel:
    """A panel of series. Those without a figure are left out."""
    name = "-".join(filter(None, (slug(picture.name), slug(value) if value else "")))
    aid = picture.aid or "The table below has every figure."
    title = f"{picture.title}, {value}" if value else picture.title
    y_title = picture.y[0].title
    if len(picture.y) > 1:
        unit = y_title.rpartition(", ")[2] if ", " in y_title else ""
        y_title = ", ".join(filter(None, (picture.title.lower(), unit)))
    table, series = _table(picture, rows), _series(picture, rows)
    values = [figure for each in series for figure in each.y if figure is not None]
    if not values:
        said = f"The file has no figures of this kind: {y_title}."
        return Panel(name, title, aid, [], {}, table, absent=said)
    vertical = axis(y_title)
    if picture.mark in ("points", "lines"):
        apart = min(values) > 0 and max(values) >= LOG_FROM * min(values)
        vertical = log_axis(y_title) if apart else vertical | {"rangemode": "tozero"}
    numeric = picture.mark == "lines" and _numeric(picture, rows)
    below = ", ".join(each.title for each in picture.x)
    drawn = [
        _trace(at, each, picture.mark, numeric)
        for at, each in enumerate(series)
        if any(figure is not None for figure in each.y)
    ]
    layout: dict[str, Any] = {
        "xaxis": axis(below, type="linear" if numeric else "category"),
        "yaxis": vertical,
        "showlegend": len(drawn) > 1,
    }
    if picture.mark == "points":
        layout["scattermode"] = "group"
    elif picture.mark != "lines":
        layout["barmode"] = "stack" if picture.mark == "stack" else "group"
    return Panel(name, title, aid, drawn, layout, table)


def _table(picture: Picture, rows: Sequence[Row]) -> Table:
    """The columns that any row has a figure for."""
    ends = [Axis(key, key.replace("_", " ")) for key in (picture.low, picture.high) if key]
    columns = list({each.key: each for each in (*_axes(picture), *ends)}.values())
    shown = [each for each in columns if any(row[each.key] is not None for row in rows)]
    cells: list[list[Cell]] = [[row[each.key] for each in shown] for row in rows]
    return Table(tuple(each.title for each in shown), cells)


def _table_alone(report: Row) -> Panel:
    """The rows of a report that declares no picture, in their own units."""
    rows = rows_of(report)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Panel(
        "rows",
        "What was measured",
        "Each line of the table is a row of the bench's JSON, in its own units.",
        [],
        {},
        Table(tuple(names), [[_cell(row.get(name)) for name in names] for row in rows]),
        absent="Nothing is drawn of this bench; its rows are in the table.",
    )


def _cell(value: Any) -> Cell:
    """A value as it is, or as JSON where it has parts."""
    if value is None or isinstance(value, bool | str) or is_number(value):
        return value
    return json.dumps(value)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | more


def log_axis(title: str) -> dict[str, Any]:
    return axis(f"{title} (log scale)", type="log", dtick="D2")


def is_number(value: Any) -> TypeGuard[float]:
    """True if it can be drawn: finite, and not a bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -MOST <= value <= MOST


def wrong(place: str, value: Any, wanted: str) -> SpeqError:
    """An error for what cannot be drawn."""
    if value is None:
        return FileError(f"{place} is missing; it must be {wanted}: measure again")
    shown = repr(value)
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return FileError(f"{place} is {shown}; it must be {wanted}: measure again")


def _trace(at: int, series: Series, mark: Mark, numeric: bool) -> Trace:
    colour = f"@{at % COLOURS + 1}"
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
