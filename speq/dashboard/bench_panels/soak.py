"""Panels of `speq bench soak`: whether memory and times stay what they were."""

from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, gibibytes, rows_of, table_of
from speq.dashboard.panel import Panel

AT, TOKENS = Column("time since the start, s", "at_s", needed=True), Column("tokens", "tokens")
TPOT = Column("time per output token, ms", "tpot_ms")
ALLOCATED = gibibytes("device, allocated", "allocated_bytes")
RESERVED = gibibytes("device, reserved", "reserved_bytes")
PROCESS = gibibytes("process", "process_bytes")


def panels(report: Row) -> list[Panel]:
    """Memory and times over the run."""
    rows = rows_of(report, (AT, TOKENS, TPOT, ALLOCATED, RESERVED, PROCESS))
    memory = [
        (each.title, each, None)
        for each in (PROCESS, ALLOCATED, RESERVED)
        if any(row[each.key] is not None for row in rows)
    ]
    return [
        picture(
            "memory",
            "Memory over the run",
            "A line that keeps rising is memory that is never given back.",
            by_figure(rows, AT, memory),
            "lines",
            (AT.title, "memory, GiB"),
            table_of(rows, (AT, PROCESS, ALLOCATED, RESERVED)),
        ),
        picture(
            "tpot",
            "Time per output token over the run",
            "A line that keeps rising is a run that becomes slower.",
            by_figure(rows, AT, [(TPOT.title, TPOT, None)]),
            "lines",
            (AT.title, TPOT.title),
            table_of(rows, (AT, TOKENS, TPOT)),
        ),
    ]
