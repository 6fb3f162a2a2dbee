"""Panels of `speq bench batch`: speed, target efficiency and experts over texts and drafts."""

from speq.dashboard.bench_panels.picture import Series, by_name, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, table_of
from speq.dashboard.panel import Panel

TEXTS = Column("texts", "texts", needed=True)
LENGTH = label("draft length", "draft_length")
SPEED = Column("tokens a second", "tokens_per_s")
LEAST = Column("least, tokens a second", "tokens_per_s_least")
MOST = Column("most, tokens a second", "tokens_per_s_most")
TPOT = Column("time per output token, ms", "tpot_ms")
VERIFY = Column("verification, ms", "verify_ms")
DRAFT = Column("draft, ms", "draft_ms")
EFFICIENCY = Column("target efficiency", "target_efficiency")
ACCEPTED = Column("tokens a step and text", "accept_length")
ROWS = Column("rows of a verification", "rows_mean", needed=True)
EXPERTS = Column("distinct experts of a layer", "distinct")
INDEPENDENT = Column("N(t)", "independent")
EACH = Column("rows of an expert", "tokens_per_expert")
MOVED = Column("moved a token, MB", "moved_mb")
OF_PLAIN = Column("speed beside no draft", "speedup")
OF_HELD = Column("speed beside no drafting", "speedup_held")
MODELLED = Column("speed by Algorithm 1", "modelled")
FITTED = Column("fitted", "fitted", None)
ALL = (
    *(TEXTS, LENGTH, SPEED, LEAST, MOST, TPOT, VERIFY, DRAFT, EFFICIENCY, ACCEPTED, ROWS, EXPERTS),
    *(INDEPENDENT, EACH, MOVED, OF_PLAIN, OF_HELD, MODELLED, FITTED),
)


def panels(report: Row) -> list[Panel]:
    """Speed, what verifying costs, what is loaded for it, and what Algorithm 1 says of it."""
    rows = rows_of(report, ALL)
    return [_speed(rows), _efficiency(rows), _experts(rows), _modelled(rows)]


def _speed(rows: list[Row]) -> Panel:
    return picture(
        "speed",
        "Tokens a second of all texts together",
        "Higher is faster: points are medians over rounds, and error bars go from the least to the "
        "most.",
        by_name(rows, TEXTS, LENGTH, SPEED, LEAST, MOST),
        "points",
        (TEXTS.title, SPEED.title),
        table_of(rows, ALL),
    )


def _efficiency(rows: list[Row]) -> Panel:
    drafting = [row for row in rows if row["target_efficiency"] is not None]
    return picture(
        "target-efficiency",
        "What it costs to verify drafts",
        "A pass over single tokens beside one over drafts: at 1 drafts are verified for nothing.",
        by_name(drafting, TEXTS, LENGTH, EFFICIENCY),
        "lines",
        (TEXTS.title, EFFICIENCY.title),
        table_of(drafting, (TEXTS, LENGTH, EFFICIENCY, VERIFY, DRAFT, ROWS)),
        "No draft length was measured.",
    )


def _experts(rows: list[Row]) -> Panel:
    ordered = sorted(rows, key=lambda row: row["rows_mean"])
    x = [row["rows_mean"] for row in ordered]
    series = [
        Series("asked for", x, [row["distinct"] for row in ordered]),
        Series("independent tokens, N(t)", x, [row["independent"] for row in ordered]),
    ]
    return picture(
        "experts",
        "Distinct experts that a layer is asked for",
        "Where the counted line lies below N(t), tokens share more experts than chance would have.",
        series,
        "lines",
        (ROWS.title, EXPERTS.title),
        table_of(ordered, (TEXTS, LENGTH, ROWS, EXPERTS, INDEPENDENT, EACH, MOVED)),
    )


def _modelled(rows: list[Row]) -> Panel:
    told = [row for row in rows if row["modelled"] is not None]
    cells = [f"{row['texts']:g} by {row['draft_length']}" for row in told]

    def by_algorithm(name: str, fitted: str) -> Series:
        y = [row["modelled"] if row["fitted"] == fitted else None for row in told]
        return Series(name, cells, y)

    return picture(
        "algorithm-1",
        "Speed-ups by Algorithm 1 of MoESD",
        "The nearer to what was measured the better: those held out were not fitted to.",
        [
            Series("measured", cells, [row["speedup_held"] for row in told]),
            by_algorithm("fitted to", "yes"),
            by_algorithm("held out", "no"),
        ],
        "points",
        ("texts by draft length", OF_HELD.title),
        table_of(told, (TEXTS, LENGTH, OF_HELD, MODELLED, FITTED)),
        "Algorithm 1 was not fitted.",
    )
