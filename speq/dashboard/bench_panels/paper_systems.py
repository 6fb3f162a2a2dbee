"""Panels of `speq bench paper-systems`: systems of MoE-SpeQ's Figure 13 as plans expect them."""

from speq.dashboard.bench_panels.picture import by_name, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    label,
    megabytes,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

MODEL, BUDGET = label("model", "model"), label("memory", "budget")
SYSTEM, WHERE = label("system", "system"), label("model and memory", "where")
SLOTS, HELD = Column("slots", "slots"), share("of all experts", "held")
LENGTH = Column("draft length", "draft_length")
TPOT = Column("expected time per output token, ms", "tpot_ms")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
PAPER_PLACE, PLACE = Column("paper's place", "paper_place"), Column("place", "place")


def panels(report: Row) -> list[Panel]:
    """Expected times, for each model and memory."""
    columns = (MODEL, BUDGET, SYSTEM, SLOTS, HELD, LENGTH, TPOT, MOVED, PAPER_PLACE, PLACE)
    rows = rows_of(report, columns)
    for row in rows:
        row["where"] = f"{row['model']}, {row['budget']}"
    return [
        picture(
            "tpot",
            "Expected time per output token",
            "Lower is faster: points are what plans expect, and nothing was measured.",
            by_name(rows, WHERE, SYSTEM, TPOT),
            "points",
            (WHERE.title, TPOT.title),
            table_of(rows, columns),
        )
    ]
