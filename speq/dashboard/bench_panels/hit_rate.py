"""Panels of `speq bench hit-rate`: experts in slots when they are needed (MoE-SpeQ's Table 3)."""

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

SLOTS, POLICY = label("slots of a layer", "slots"), label("policy", "policy")
ALL_SLOTS = Column("slots of all layers", "total_slots")
LENGTH = Column("draft length", "draft_length")
AT_START = share("experts there at the start", "coverage_at_start")
IN_TIME = share("experts there in time", "coverage_in_time")
BESIDE = share("experts there in time, other model's times", "coverage_in_time_beside")
REQUESTS = share("requests that were hits", "request_hit_rate")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
WASTED = Column("experts brought for nothing", "wasted")
SHOWN = (
    ("in-time", "Experts that were there in time", IN_TIME),
    ("at-start", "Experts that were there when a verification began", AT_START),
    ("requests", "Requests that found their expert", REQUESTS),
)
# Of a file with another model's times.
OTHER = ("beside", "Experts that were there in time, with the other model's times", BESIDE)


def panels(report: Row) -> list[Panel]:
    """Coverage, hits and bytes of policies over slots."""
    columns = (SLOTS, POLICY, ALL_SLOTS, LENGTH, AT_START, IN_TIME, BESIDE, REQUESTS, MOVED, WASTED)
    rows = rows_of(report, columns)
    has_beside = any(row["coverage_in_time_beside"] is not None for row in rows)
    shown = (*SHOWN, OTHER) if has_beside else SHOWN
    drawn = [
        picture(
            name,
            title,
            "Higher is better: bars of one colour are a policy, with more slots to the right.",
            by_name(rows, SLOTS, POLICY, figure),
            "bars",
            (SLOTS.title, figure.title),
            table_of(rows, (SLOTS, POLICY, ALL_SLOTS, LENGTH, figure)),
        )
        for name, title, figure in shown
    ]
    moved = picture(
        "moved",
        "Bytes moved per token",
        "Lower is less to move: bars of one colour are a policy, with more slots to the right.",
        by_name(rows, SLOTS, POLICY, MOVED),
        "bars",
        (SLOTS.title, MOVED.title),
        table_of(rows, (SLOTS, POLICY, MOVED, WASTED)),
    )
    return [*drawn, moved]
