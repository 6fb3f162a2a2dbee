"""Panels of `speq bench drafters`: what stands of each drafter's tokens, and what they cost."""

from speq.dashboard.bench_panels.picture import Series, by_name, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    label,
    megabytes,
    rows_of,
    table_of,
)
from speq.dashboard.panel import Panel, Table
from speq.errors import SpeqError

BUDGET = label("memory budget", "budget")
TEMPERATURE = label("temperature", "temperature")
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
    """Times, bytes, lengths and diversity of all drafters; acceptance by depth and by rank."""
    rows = rows_of(report, (BUDGET, TEMPERATURE, DRAFTER, *FIGURES))
    for row, given in zip(rows, report["rows"], strict=True):
        budget = f"{row['budget']}, " if len(distinct(rows, "budget")) > 1 else ""
        row["setting"] = f"{budget}temperature {row['temperature']:g}"
        row["by_depth"], row["by_rank"] = (_shares(given, key) for key in ("by_depth", "by_rank"))
    each = "Each bar is the median over texts and rounds"
    return [
        _bars("tpot", "Time per output token", f"{each}; lower is faster.", rows, TPOT),
        _bars("moved", "Bytes moved per token", f"{each}; lower is less.", rows, MOVED),
        _bars("length", "Tokens of a step", "Higher is better; 1: nothing stands.", rows, LENGTH),
        _along("depth", "Drafted tokens that stand, by depth", rows, "by_depth", "depth"),
        _along("rank", "Drafted tokens that stand, by rank", rows, "by_rank", "rank"),
        _bars("tdi", "Token diversity", "1: the likeliest tokens are equally likely.", rows, TDI),
    ]


def notes(report: Row) -> list[str]:
    """Drafters that could not be had."""
    left_out = report.get("left_out") or {}
    if not isinstance(left_out, dict):
        raise SpeqError("left_out is no object; measure again")
    return [f"Left out: {name}: {reason}" for name, reason in left_out.items()]


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


def _along(name: str, title: str, rows: list[Row], key: str, across: str) -> Panel:
    """A line for each drafter and setting, over depth or rank, from 1 on."""
    series = [
        Series(f"{row['drafter']}, {row['setting']}", [*range(1, len(row[key]) + 1)], row[key])
        for row in rows
        if row[key]
    ]
    most = max((len(row[key]) for row in rows), default=0)
    cells = [
        [row["setting"], row["drafter"], *row[key], *[None] * (most - len(row[key]))]
        for row in rows
        if row[key]
    ]
    titles = (SETTING.title, DRAFTER.title, *(f"{across} {at + 1}, %" for at in range(most)))
    aid = "Of the tokens behind one that stands, the share that stands: higher is better."
    return picture(
        name, title, aid, series, "lines", (across, "tokens that stand, %"), Table(titles, cells)
    )


def _shares(row: Row, key: str) -> list[float | None]:
    """In percent. Raises SpeqError for what is no list of shares."""
    found = row.get(key)
    fine = isinstance(found, list) and all(
        each is None or (isinstance(each, int | float) and 0 <= each <= 1) for each in found
    )
    if not fine:
        raise SpeqError(f"{key} is {found!r}; it must be a list of shares: measure again")
    return [None if each is None else 100.0 * each for each in found or []]
