"""Panels of `speq bench breakdown`: where the time of decoding goes."""

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

BUDGET, SYSTEM = label("memory budget", "budget"), label("system", "system")
WHERE = label("budget and system", "where")
TPOT, SPREAD = Column("time per output token, ms", "tpot_ms"), share("spread of times", "spread")
WAITING, DRAFTING = share("waiting for experts", "waiting"), share("drafting", "drafting")
VERIFYING, REST = share("verifying", "verifying"), share("the rest", "rest")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
HIDDEN = share("transfers hidden behind work", "hidden_share")
PARTS: tuple[tuple[str, Column, str | None], ...] = (
    ("waiting for experts", WAITING, "@stall"),
    ("drafting", DRAFTING, "@draft"),
    ("verifying", VERIFYING, "@verify"),
    ("the rest", REST, "@rest"),
)


def panels(report: Row) -> list[Panel]:
    """Shares of decoding, times, and bytes."""
    parts = (WAITING, DRAFTING, VERIFYING, REST)
    rows = rows_of(report, (BUDGET, SYSTEM, TPOT, SPREAD, *parts, MOVED, HIDDEN))
    for row in rows:
        row["where"] = f"{row['budget']}, {row['system']}"
    shares = picture(
        "shares",
        "Where the time of decoding goes",
        "A bar is all time in decode steps, from its bottom: waiting, drafting, verifying and the "
        "rest.",
        by_figure(rows, WHERE, PARTS),
        "stack",
        (WHERE.title, "time of decoding, %"),
        table_of(rows, (BUDGET, SYSTEM, *parts)),
    )
    more = [
        picture(
            name,
            title,
            aid,
            by_name(rows, BUDGET, SYSTEM, figure),
            "bars",
            (BUDGET.title, figure.title),
            table_of(rows, (BUDGET, SYSTEM, figure, *beside)),
        )
        for name, title, aid, figure, beside in (
            ("tpot", "Time per output token", "Lower is faster.", TPOT, (SPREAD,)),
            ("moved", "Bytes moved per token", "Lower is less.", MOVED, ()),
            (
                *("hidden", "Transfers hidden behind work", "Higher is less to wait for."),
                *(HIDDEN, ()),
            ),
        )
    ]
    return [shares, *more]
