"""Panels of `speq bench schedule`: the scheduler, plain LRU, and the floors of both."""

from speq.dashboard.bench_panels.picture import by_figure, by_name, picture
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

MEMORY = Column("slots, % of all experts", "fraction", 100.0, needed=True)
SYSTEM, WHERE = label("system", "system"), label("slots and system", "where")
SLOTS, SAMPLES = Column("slots", "slots"), Column("samples", "samples")
TPOT, FLOOR = Column("time per output token, ms", "tpot_ms"), Column("floor, ms", "floor_ms")
OF_FLOOR, OF_LRU = Column("of its floor", "of_floor"), Column("of LRU's time", "of_lru")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
OF_LRU_BYTES = Column("of LRU's bytes", "moved_of_lru")
STALL, HIDDEN = share("time spent waiting", "stall_share"), share("hidden", "hidden_share")
HITS = share("hit rate", "hit_rate")


def panels(report: Row) -> list[Panel]:
    """Times beside their floors, bytes, and hits."""
    columns = (
        *(MEMORY, SYSTEM, SLOTS, TPOT, FLOOR, OF_FLOOR, OF_LRU, MOVED, OF_LRU_BYTES),
        *(STALL, HIDDEN, HITS, SAMPLES),
    )
    rows = rows_of(report, columns)
    for row in rows:
        row["where"] = f"{row['fraction']:.0f}%, {row['system']}"
    times = picture(
        "tpot",
        "Time per output token, and its floor",
        "The nearer a system's time comes to its floor, the less is left to gain: the floor is "
        "the longer of computing and moving its useful bytes.",
        by_figure(rows, WHERE, [("time", TPOT, "@verify"), ("floor", FLOOR, "@expected")]),
        "bars",
        (WHERE.title, TPOT.title),
        table_of(rows, (MEMORY, SYSTEM, SLOTS, TPOT, FLOOR, OF_FLOOR, OF_LRU, SAMPLES)),
    )
    more = [
        picture(
            name,
            title,
            aid,
            by_name(rows, MEMORY, SYSTEM, figure),
            "bars",
            (MEMORY.title, figure.title),
            table_of(rows, (MEMORY, SYSTEM, figure, *beside)),
        )
        for name, title, aid, figure, beside in (
            ("moved", "Bytes moved per token", "Lower is less.", MOVED, (OF_LRU_BYTES,)),
            ("stall", "Time spent waiting for experts", "Lower is better.", STALL, (HIDDEN,)),
            ("hit-rate", "Experts that were there in time", "Higher is better.", HITS, ()),
        )
    ]
    return [times, *more]
