"""Panels of `speq bench step`: where a draft token's and a verification's time goes."""

from speq.dashboard.bench_panels.picture import by_name, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, share, table_of
from speq.dashboard.panel import Panel

PASS, PART = label("pass", "pass"), label("part", "part")
TIME, SHARE = Column("time, ms", "time_ms"), share("share", "share")
PASSES = Column("passes", "passes")
# The row of a whole pass.
ALL = "all"


def panels(report: Row) -> list[Panel]:
    """Parts of each pass, one on top of the other."""
    rows = rows_of(report, (PASS, PART, TIME, SHARE, PASSES))
    parts = [row for row in rows if row["part"] != ALL]
    return [
        picture(
            "parts",
            "Where the time of a pass goes",
            "A bar is a pass, and the thicker a part of it, the more of the time it takes.",
            by_name(parts, PASS, PART, TIME),
            "stack",
            (PASS.title, TIME.title),
            table_of(rows, (PASS, PART, TIME, SHARE, PASSES)),
        )
    ]
