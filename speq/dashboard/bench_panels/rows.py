"""Rows of a bench's JSON as pictures take them: checked, and in the units that are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speq.dashboard.panel import Cell, Table
from speq.errors import SpeqError

Row = dict[str, Any]
# Beyond any figure; what is not a number is not within it either.
MOST = 1e100
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of rows. title: with its unit; key: in a row.

    scale   what a number is multiplied by; None: a name, which is a text or a number
    needed  a row without it is damaged; others are of an older version, and have None
    """

    title: str
    key: str
    scale: float | None = 1.0
    needed: bool = False


def label(title: str, key: str, needed: bool = True) -> Column:
    """What a row is of."""
    return Column(title, key, None, needed)


def share(title: str, key: str) -> Column:
    """A share, which is shown in percent."""
    return Column(f"{title}, %", key, 100.0)


def megabytes(title: str, key: str) -> Column:
    return Column(f"{title}, MB", key, 1e-6)


def gibibytes(title: str, key: str) -> Column:
    return Column(f"{title}, GiB", key, 2.0**-30)


def rows_of(report: Row, columns: Sequence[Column], name: str = "rows") -> list[Row]:
    """Each row of the list `name` with the figures of `columns`, by key, in their units.

    Raises SpeqError, naming the place, for what is no list of objects with such figures.
    """
    found = report.get(name)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise wrong(name, found, "a list of objects")
    if not found:
        raise SpeqError(f"{name} is an empty list, and there is nothing to draw; measure again")
    return [
        {column.key: _cell(f"{name}[{at}]", row, column) for column in columns}
        for at, row in enumerate(found)
    ]


def further_rows(report: Row, columns: Sequence[Column], name: str) -> list[Row]:
    """The same of a list that older versions did not write, or that may be empty."""
    return [] if report.get(name) in (None, []) else rows_of(report, columns, name)


def numbers_of(report: Row, key: str, name: str = "rows") -> list[list[float] | None]:
    """The list of numbers that each row has under `key`; None where it has none."""
    return [
        None if row.get(key) is None else _numbers(f"{name}[{at}].{key}", row[key])
        for at, row in enumerate(report[name])
    ]


def figures_of(report: Row, key: str, name: str = "rows") -> list[dict[str, float]]:
    """The numbers by name that each row has under `key`; none where it has nothing."""
    found = []
    for at, row in enumerate(report[name]):
        value, place = row.get(key) or {}, f"{name}[{at}].{key}"
        if not isinstance(value, dict):
            raise wrong(place, value, "an object")
        found.append(dict(zip(value, _numbers(place, [*value.values()]), strict=True)))
    return found


def settings_of(report: Row) -> Row:
    """How a bench was run. Raises SpeqError where the report does not say."""
    found = report.get("settings")
    if not isinstance(found, dict):
        raise wrong("settings", found, "an object")
    return found


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """What rows have under `key`, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def table_of(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Rows with the columns that any of them has a figure for."""
    shown = [each for each in columns if any(row[each.key] is not None for row in rows)]
    cells: list[list[Cell]] = [[row[each.key] for each in shown] for row in rows]
    return Table(tuple(each.title for each in shown), cells)


def wrong(place: str, value: Any, wanted: str) -> SpeqError:
    """For what cannot be drawn."""
    if value is None:
        return SpeqError(f"{place} is missing; it must be {wanted}: measure again")
    shown = repr(value)
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return SpeqError(f"{place} is {shown}; it must be {wanted}: measure again")


def is_number(value: Any) -> bool:
    """Whether it can be drawn: finite, and no truth value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -MOST <= value <= MOST


def _cell(place: str, row: Row, column: Column) -> Any:
    value, place = row.get(column.key), f"{place}.{column.key}"
    if value is None and not column.needed:
        return None
    if column.scale is None:
        if not isinstance(value, str) and not is_number(value):
            raise wrong(place, value, "a name or a number")
        return value
    if not is_number(value):
        raise wrong(place, value, "a number")
    return value if column.scale == 1.0 else value * column.scale  # type: ignore[operator]


def _numbers(place: str, value: Any) -> list[float]:
    if not isinstance(value, list) or not all(map(is_number, value)):
        raise wrong(place, value, "numbers")
    return value
