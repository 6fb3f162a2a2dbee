"""Panels of `speq bench drafters`: what stands of each drafter's tokens, and what they cost."""

from typing import Any

from speq.dashboard.bench_panels.picture import Series, by_name, picture, slug
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    is_number,
    label,
    megabytes,
    rows_of,
    table_of,
    wrong,
)
from speq.dashboard.panel import Panel, Table

BUDGET = label("memory budget", "budget")
TEMPERATURE = Column("temperature", "temperature", needed=True)
DRAFTER = label("drafter", "drafter")
SETTING = label("setting", "setting")
LENGTH = Column("tokens of a step", "accept_length")
TDI = Column("token diversity index", "tdi")
DRAFTED = Column("unique drafted tokens of a text", "unique_drafted")
ACCEPTED = Column("unique accepted tokens of a text", "unique_accepted")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
TPOT = Column("time per output token, ms", "tpot_ms")
OF_NONE = Column("time, of that without a draft", "tpot_of_none")
MEMORY = megabytes("memory of the draft", "draft_bytes")
SLOTS = Column("slots", "slots")
FIGURES = (LENGTH, TDI, DRAFTED, ACCEPTED, MOVED, TPOT, OF_NONE, MEMORY, SLOTS)


def panels(report: Row) -> list[Panel]:
    """Times, bytes, lengths and diversity of all drafters; acceptance by depth and by rank.

    Acceptance has a panel for each setting: lines of all settings in one could not be told apart.
    """
    rows = rows_of(report, (BUDGET, TEMPERATURE, DRAFTER, *FIGURES))
    several = len(distinct(rows, "budget")) > 1
    for at, (row, given) in enumerate(zip(rows, report["rows"], strict=True)):
        budget = f"{row['budget']}, " if several else ""
        row["setting"] = f"{budget}temperature {row['temperature']:g}"
        for key in ("by_depth", "by_rank"):
            row[key] = _shares(f"rows[{at}].{key}", given.get(key))
    each = "Each bar is the median over texts and rounds"
    most = "Higher is better, and at 1 nothing that was drafted stands."
    even = "At 1 the likeliest tokens of a draft's choice are equally likely."
    return [
        _bars("tpot", "Time per output token", f"{each}; lower is faster.", rows, TPOT),
        _bars("moved", "Bytes moved per token", f"{each}; lower is less.", rows, MOVED),
        _bars("length", "Tokens of a step", most, rows, LENGTH),
        *(_along("depth", setting, rows) for setting in distinct(rows, "setting")),
        *(_along("rank", setting, rows) for setting in distinct(rows, "setting")),
        _bars("tdi", "Token diversity", even, rows, TDI),
    ]


def notes(report: Row) -> list[str]:
    """Drafters that could not be had."""
    left_out = report.get("left_out")
    if left_out is None:
        return []
    if not isinstance(left_out, dict):
        raise wrong("left_out", left_out, "an object")
    for name, reason in left_out.items():
        if not isinstance(reason, str):
            raise wrong(f"left_out.{name}", reason, "a reason")
    return [f"Not measured: {name}: {reason}." for name, reason in left_out.items()]


def _bars(name: str, title: str, aid: str, rows: list[Row], figure: Column) -> Panel:
    beside = tuple(each for each in FIGURES if each is not figure)
    return picture(
        name,
        title,
        aid,
        by_name(rows, DRAFTER, SETTING, figure),
        "bars",
        (DRAFTER.title, figure.title),
        table_of(rows, (SETTING, DRAFTER, figure, *beside)),
    )


def _along(across: str, setting: str, rows: list[Row]) -> Panel:
    """A line for each drafter at a setting, over depth or rank, from 1 on.

    A drafter that drafted nothing here keeps its place among the lines, so that each of the others
    looks the same at all settings.
    """
    key = f"by_{across}"
    here = {row["drafter"]: row[key] for row in rows if row["setting"] == setting}
    found = {drafter: here.get(drafter, []) for drafter in distinct(rows, "drafter")}
    most = max(map(len, found.values()))
    cells = [
        [drafter, *shares, *[None] * (most - len(shares))]
        for drafter, shares in found.items()
        if shares
    ]
    return picture(
        f"{across}-{slug(setting)}",
        f"Drafted tokens that stand, by {across}, {setting}",
        "Of the tokens behind one that stands, the share that stands: higher is better.",
        [  # places are names, as there is nothing between two of them
            Series(str(drafter), [str(at) for at in range(1, len(shares) + 1)], shares)
            for drafter, shares in found.items()
        ],
        "lines",
        (across, "tokens that stand, %"),
        Table((DRAFTER.title, *(f"{across} {at + 1}, %" for at in range(most))), cells),
        "Nothing was drafted at this setting.",
    )


def _shares(place: str, found: Any) -> list[float | None]:
    """In percent. Raises SpeqError for what is no list of shares; one that is not known is None."""
    if not isinstance(found, list) or not all(map(_is_share, found)):
        raise wrong(place, found, "a list of shares")
    return [None if each is None else 100.0 * each for each in found]


def _is_share(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value <= 1)
