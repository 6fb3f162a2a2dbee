"""Panels of `speq bench serve`: what a server's clients wait for, at each rate of requests."""

from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, table_of
from speq.dashboard.panel import Panel

RATE = label("requests per second", "rate")
WHOLE, REFUSED = Column("answered whole", "whole"), Column("refused", "refused")
FAILED = Column("failed", "failed")
SPEED = Column("tokens per second", "tokens_per_s")
SHARES = (50, 95, 99)


def of_shares(title: str, name: str) -> tuple[Column, ...]:
    return tuple(Column(f"{title}, p{share}, ms", f"{name}_p{share}_ms") for share in SHARES)


FIRST, TOKEN = of_shares("time to first token", "ttft"), of_shares("time per token", "tpot")
LATENCY, QUEUED = of_shares("time of an answer", "latency"), of_shares("in the queue", "queued")
OUTCOMES = (WHOLE, REFUSED, FAILED)


def panels(report: Row) -> list[Panel]:
    """Times, speed and what came of the requests, over rates."""
    rows = rows_of(report, (RATE, *OUTCOMES, SPEED, *FIRST, *TOKEN, *LATENCY, *QUEUED))
    return [
        times("ttft", "Time to first token", rows, FIRST),
        times("tpot", "Time per output token", rows, TOKEN),
        times("latency", "Time of a whole answer", rows, LATENCY),
        times("queued", "Time in the server's queue", rows, QUEUED),
        picture(
            "speed",
            "Tokens per second of all requests together",
            "Where bars stop growing with the rate, the server does as much as it can.",
            by_figure(rows, RATE, [("tokens per second", SPEED, None)]),
            "bars",
            (RATE.title, SPEED.title),
            table_of(rows, (RATE, SPEED)),
        ),
        picture(
            "outcomes",
            "What came of the requests",
            "Only requests that were answered whole are in the times.",
            by_figure(rows, RATE, [(each.title, each, None) for each in OUTCOMES]),
            "stack",
            (RATE.title, "requests"),
            table_of(rows, (RATE, *OUTCOMES)),
        ),
    ]


def times(name: str, title: str, rows: list[Row], columns: tuple[Column, ...]) -> Panel:
    """One time by its percentiles."""
    series = [(f"p{share}", column, None) for share, column in zip(SHARES, columns, strict=True)]
    return picture(
        name,
        title,
        "Lower is sooner: half of the requests kept within p50, and 99 of 100 within p99.",
        by_figure(rows, RATE, series),
        "bars",
        (RATE.title, "time, ms"),
        table_of(rows, (RATE, *columns)),
    )
