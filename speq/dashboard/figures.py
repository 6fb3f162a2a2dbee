"""Traces and layouts of plotly.js, as dictionaries. Each series has a colour and, beside it, a
pattern, a dash or a symbol: nobody needs to tell colours apart.

https://plotly.com/javascript/reference/
"""

import math
from collections.abc import Sequence
from typing import Any

Trace = dict[str, Any]
Layout = dict[str, Any]
Values = Sequence[float | int | str | None]

PATTERNS = ("", "/", "\\", "x", "-", "|", "+", ".")
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "x",
    "star",
    "triangle-down",
)


def bars(name: str, x: Values, y: Values, colour: str, pattern: str = "", **more: Any) -> Trace:
    """colour: one of `COLOURS`, by its name."""
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {
            "color": f"@{colour}",
            "pattern": {"shape": pattern, "fgcolor": "@text", "fillmode": "overlay", "size": 6},
        },
        **more,
    }


def line(
    name: str,
    x: Values,
    y: Values,
    colour: str,
    dash: str = "solid",
    symbol: str | None = "circle",
    **more: Any,
) -> Trace:
    """symbol: at each point; None: the line alone."""
    made: Trace = {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "lines" if symbol is None else "lines+markers",
        "line": {"color": f"@{colour}", "dash": dash},
        **more,
    }
    if symbol is not None:
        made["marker"] = {"color": f"@{colour}", "symbol": symbol, "size": 7}
    return made


def points(name: str, x: Values, y: Values, colour: str, symbol: str, **more: Any) -> Trace:
    return {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "markers",
        "marker": {"color": f"@{colour}", "symbol": symbol, "size": 9},
        **more,
    }


def heat(
    x: Values, y: Values, z: Sequence[Values], title: str, form: str = "", **more: Any
) -> Trace:
    """z: rows of y. title: of the colours' key, with its unit; form: of its numbers."""
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": title, "side": "right"}, "tickformat": form},
        **more,
    }


def mirrored_ticks(most_below: float, most_above: float) -> tuple[list[float], list[str]]:
    """(places, texts) of the ticks of an axis whose numbers grow both ways from zero."""
    most = max(most_below, most_above, 1e-9)
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(times for times in (0.2, 0.5, 1, 2) if most / (step * times) <= 6)
    first, last = -math.floor(most_below / step), math.floor(most_above / step)
    places = [round(at * step, 9) for at in range(first, last + 1)]
    return places, [f"{abs(place):g}" for place in places]


def layout(x: str, y: str, **more: Any) -> Layout:
    """x, y: titles of the axes, with units. `xaxis_` and `yaxis_` keys go into the axes."""
    made: Layout = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for name, value in more.items():
        axis, _, key = name.partition("_")
        if axis in made and key:
            made[axis][key] = value
        else:
            made[name] = value
    return made
