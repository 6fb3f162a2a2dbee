"""Panels of `speq bench gpu-link`: a GPU's memory, its link, and what calls take."""

from speq.dashboard.bench_panels.picture import Series, by_name, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, table_of
from speq.dashboard.panel import Panel
from speq.units import format_bytes

WHAT, SIZE = label("what", "what"), Column("bytes", "size_bytes")
SIZE_TEXT = label("size of a copy", "size")
TIME, RATE = Column("time, us", "time_us"), Column("speed, GB/s", "gb_per_s")
ROUNDS = Column("rounds", "rounds")


def panels(report: Row) -> list[Panel]:
    """Speeds of what moves bytes, and times of what moves none."""
    rows = rows_of(report, (WHAT, SIZE, TIME, RATE, ROUNDS))
    sized = [row for row in rows if row["size_bytes"] is not None]
    for row in sized:
        row["size"] = format_bytes(row["size_bytes"])
    calls = [row for row in rows if row["size_bytes"] is None]
    return [
        picture(
            "speed",
            "How fast bytes move",
            "Higher is faster: larger copies come nearer to what the link gives at best.",
            by_name(sized, SIZE_TEXT, WHAT, RATE),
            "points",
            (SIZE_TEXT.title, RATE.title),
            table_of(sized, (WHAT, SIZE, TIME, RATE, ROUNDS)),
        ),
        picture(
            "calls",
            "What calls take",
            "Each bar is the time of one call that moves no bytes, and lower is better.",
            [Series("time", [row["what"] for row in calls], [row["time_us"] for row in calls])],
            "bars",
            (WHAT.title, TIME.title),
            table_of(calls, (WHAT, TIME, ROUNDS)),
        ),
    ]
