"""Panels of `speq bench transfer`: experts from disk beside plain reads of the same files."""

from speq.dashboard.bench_panels.picture import by_name, picture, slug
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    label,
    megabytes,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel
from speq.units import format_bytes

STORE, KIND = label("store", "store"), label("what is read", "kind")
SIZE = Column("bytes of a read", "request_bytes", needed=True)
WHAT = label("what is read", "what")
READERS = label("reads at a time", "readers")
RATE, READ = Column("speed, GB/s", "gb_per_s"), Column("bytes read, GB/s", "read_gb_per_s")
SHARE = share("of plain reads", "share")
CACHED = megabytes("left in the page cache", "cached_bytes")
COLUMNS = (STORE, KIND, SIZE, READERS, RATE, READ, SHARE, CACHED)


def panels(report: Row) -> list[Panel]:
    """A panel for each store."""
    rows = rows_of(report, COLUMNS)
    for row in rows:
        row["what"] = f"{row['kind']}, {format_bytes(row['request_bytes'])}"
    return [
        _panel(store, [row for row in rows if row["store"] == store])
        for store in distinct(rows, "store")
    ]


def _panel(store: str, rows: list[Row]) -> Panel:
    return picture(
        f"speed-{slug(store)}",
        f"Reading experts from {store}",
        "Experts come as fast as the disk gives them where their bars reach those of plain reads.",
        by_name(rows, READERS, WHAT, RATE),
        "bars",
        (READERS.title, RATE.title),
        table_of(rows, COLUMNS),
    )
