"""Panels of `speq bench kernels`: how near to the memory's speed kernels run, by rows."""

from speq.dashboard.bench_panels.picture import by_figure, by_name, picture, slug
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    label,
    rows_of,
    settings_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

SHAPE, KERNEL = label("layers of", "shape"), label("kernel", "kernel")
CALL_ROWS = label("rows of a call", "T")
SHARE = share("of a plain read's speed", "bandwidth_share")
TIME = Column("time of a call, us", "time_s", 1e6)
RATE = Column("GB/s", "gb_per_s")
EXPERTS = Column("distinct experts", "distinct_experts")
BITS = Column("bits a weight", "bits_per_weight")
TO_RAW = Column("time to plain words'", "time_to_raw")
CARD = label("card", "card")
ISSUE = Column("issuing instructions, us", "issue_s", 1e6)
BYTES = Column("reading bytes, us", "bytes_s", 1e6)
ISSUED = Column("instructions a weight", "instructions_per_weight")


def panels(report: Row) -> list[Panel]:
    """Of each shape: shares of a plain read's speed, or what machine code takes."""
    settings = settings_of(report)
    if settings.get("sass") is True or settings.get("computed") is True:
        return _computed(report)
    columns = (SHAPE, KERNEL, CALL_ROWS, SHARE, TIME, RATE, EXPERTS, BITS, TO_RAW)
    rows = rows_of(report, columns)
    return [
        _measured(shape, [row for row in rows if row["shape"] == shape], columns)
        for shape in distinct(rows, "shape")
    ]


def _measured(shape: str, rows: list[Row], columns: tuple[Column, ...]) -> Panel:
    return picture(
        f"share-{slug(shape)}",
        f"Speed of kernels, {shape}",
        "At 100% a kernel reads its experts as fast as a plain read of memory beside it.",
        by_name(rows, CALL_ROWS, KERNEL, SHARE),
        "bars",
        (CALL_ROWS.title, SHARE.title),
        table_of(rows, columns),
    )


def _computed(report: Row) -> list[Panel]:
    columns = (SHAPE, KERNEL, CARD, ISSUE, BYTES, ISSUED)
    rows = rows_of(report, columns)
    where = label("kernel and card", "where")
    for row in rows:
        row["where"] = f"{row['kernel']}, {row['card']}"
    found = []
    for shape in distinct(rows, "shape"):
        mine = [row for row in rows if row["shape"] == shape]
        series = [("issuing instructions", ISSUE, None), ("reading bytes", BYTES, None)]
        found.append(
            picture(
                f"issue-{slug(shape)}",
                f"What kernels take on cards, {shape}",
                "A call takes the longer of both times at the least; they are computed.",
                by_figure(mine, where, series),
                "bars",
                (where.title, "time of a call, us"),
                table_of(mine, columns),
            )
        )
    return found
