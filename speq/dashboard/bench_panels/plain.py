"""A table of the rows of a bench that nothing is drawn of."""

import json
from typing import Any

from speq.dashboard.bench_panels.rows import Row, is_number, rows_of
from speq.dashboard.panel import Cell, Panel, Table


def panels(report: Row) -> list[Panel]:
    """One panel without a picture."""
    rows_of(report, ())
    names = list(dict.fromkeys(name for row in report["rows"] for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in report["rows"]]
    return [
        Panel(
            "rows",
            "What was measured",
            "Each line of the table is a row of the bench's JSON, in its own units.",
            [],
            {},
            Table(tuple(names), cells),
            absent="Nothing is drawn of this bench; its rows are in the table.",
        )
    ]


def _cell(value: Any) -> Cell:
    """As it is, or as JSON where it has parts."""
    if value is None or isinstance(value, bool | str) or is_number(value):
        return value
    return json.dumps(value)
