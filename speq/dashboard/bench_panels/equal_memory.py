"""Panels of `speq bench equal-memory`: systems over shares of the experts' memory."""

from speq.dashboard.bench_panels.picture import by_figure, by_name, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    further_rows,
    label,
    megabytes,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

PART, SYSTEM = label("part", "part"), label("system", "system")
CODEC, LENGTH = label("codec", "codec", needed=False), label("draft length", "draft_length", False)
LINE = label("system and part", "line")
MEMORY = Column("memory for experts, % of their bytes in plain words", "f", 100.0, needed=True)
SLOTS = Column("slots", "slots")
RATIO = Column("bytes moved per token, of LRU raw's", "ratio_to_lru_raw")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
TPOT = Column("time per output token, ms", "tpot_ms")
SPREAD = share("spread of times", "tpot_spread")
ACCEPTED = share("drafted tokens accepted", "acceptance_rate")
BITS = Column("bits a weight", "bits_per_weight")
COMPUTE = Column("compute, of plain words'", "compute")
FOUND, LIMIT, AIM = Column("found", "found"), Column("at most", "limit"), label("aim", "aim")


def panels(report: Row) -> list[Panel]:
    """Bytes and times per token, what experts take with each codec, and aims."""
    rows = rows_of(
        report,
        (PART, MEMORY, SYSTEM, CODEC, LENGTH, SLOTS, RATIO, MOVED, TPOT, SPREAD, ACCEPTED),
    )
    for row in rows:
        row["line"] = f"{row['system']}, {row['part']}"
    of = (PART, MEMORY, SYSTEM, CODEC, LENGTH, SLOTS)
    drawn = [
        picture(
            name,
            title,
            f"{lower}, and a system that has no room at a share of memory has no point there.",
            by_name(rows, MEMORY, LINE, figure),
            "lines",
            (MEMORY.title, figure.title),
            table_of(rows, (*of, figure, *beside)),
        )
        for name, title, lower, figure, beside in (
            ("bytes", "Bytes moved at equal memory", "Below 1 is less than LRU", RATIO, (MOVED,)),
            ("times", "Times at equal memory", "Lower is faster", TPOT, (SPREAD, ACCEPTED)),
        )
    ]
    return [*drawn, _codecs(report), _aims(report)]


def notes(report: Row) -> list[str]:
    """Which aims were missed."""
    return [
        f"Missed in the {row['part']} at {row['f']:.0f}%: {row['aim']} is {row['found']:.3f}, and "
        f"at most {row['limit']:.3f} was aimed at."
        for row in _found(report)
        if row["found"] > row["limit"]
    ]


def _codecs(report: Row) -> Panel:
    name = label("codec", "codec")
    rows = further_rows(report, (name, BITS, COMPUTE), "codecs")
    return picture(
        "codecs",
        "What an expert takes",
        "Each bar is the bits that a codec needs for a weight, and lower is less.",
        by_figure(rows, name, [("bits a weight", BITS, None)]),
        "bars",
        (name.title, BITS.title),
        table_of(rows, (name, BITS, COMPUTE)),
    )


def _aims(report: Row) -> Panel:
    rows = _found(report)
    for row in rows:
        row["place"] = f"{row['part']}, {row['f']:.0f}%: {row['aim']}"
    place = label("aim", "place")
    return picture(
        "aims",
        "What was aimed at, and what was found",
        "An aim is met where its found ratio lies at or below the most that was aimed at.",
        by_figure(rows, place, [("found", FOUND, "@exact"), ("at most", LIMIT, "@expected")]),
        "points",
        ("aim", "ratio"),
        table_of(rows, (PART, MEMORY, AIM, FOUND, LIMIT)),
    )


def _found(report: Row) -> list[Row]:
    needed = [Column(each.title, each.key, 1.0, needed=True) for each in (FOUND, LIMIT)]
    return further_rows(report, (PART, MEMORY, AIM, *needed), "aims")
