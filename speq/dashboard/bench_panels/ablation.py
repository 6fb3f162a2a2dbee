"""Panels of `speq bench ablation`: what each part of speq is worth."""

from speq.dashboard.bench_panels.picture import by_figure, picture
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

WITHOUT = label("without", "without")
RATE = Column("tokens a second", "tokens_per_s")
OF_FULL = share("of the speed with all parts", "of_full")
TPOT = Column("time per output token, ms", "tpot_ms")
SPREAD = share("spread of times", "spread")
LENGTH = Column("mean draft length", "draft_length_mean")
ACCEPTED = share("drafted tokens accepted", "acceptance_rate")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
DIFFERING = Column("texts that differ", "differing")
REFUSED = label("refused", "refused", needed=False)


def panels(report: Row) -> list[Panel]:
    """Speed, time and bytes without each part."""
    columns = (
        *(WITHOUT, RATE, OF_FULL, TPOT, SPREAD, LENGTH, ACCEPTED, MOVED, DIFFERING, REFUSED),
    )
    rows = rows_of(report, columns)
    measured = [row for row in rows if row["refused"] is None]
    return [
        picture(
            name,
            title,
            aid,
            by_figure(measured, WITHOUT, [(figure.title, figure, None)]),
            "bars",
            (WITHOUT.title, figure.title),
            table_of(rows, (WITHOUT, figure, *beside)),
        )
        for name, title, aid, figure, beside in (
            (
                "speed",
                "Speed without each part",
                "The lower a bar, the more the part is worth, within the spread of times.",
                OF_FULL,
                (RATE, SPREAD, DIFFERING, REFUSED),
            ),
            (
                "tpot",
                "Time per output token without each part",
                "The higher a bar, the more the part is worth, within the spread of times.",
                TPOT,
                (SPREAD, LENGTH, ACCEPTED),
            ),
            (
                "moved",
                "Bytes moved per token without each part",
                "The higher a bar, the more bytes the part saves.",
                MOVED,
                (),
            ),
        )
    ]


def notes(report: Row) -> list[str]:
    """What could not be left out."""
    return [
        f"Without {row['without']} nothing was measured: {row['refused']}."
        for row in rows_of(report, (WITHOUT, REFUSED))
        if row["refused"] is not None
    ]
