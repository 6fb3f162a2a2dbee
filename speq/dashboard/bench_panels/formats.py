"""Panels of `speq bench formats`: the same experts in BF16, in FP8 and in MXFP4, over budgets."""

from speq.dashboard.bench_panels.disturbed import FAILURE, STOLEN, failures, given_away
from speq.dashboard.bench_panels.picture import by_figure, by_name, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    gibibytes,
    label,
    megabytes,
    numbers_of,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

BUDGET, FORMAT = label("memory budget", "budget"), label("experts published in", "format")
CODEC = label("codec", "codec", needed=False)
DTYPE = label("computes in", "dtype", needed=False)
TPOT = Column("time per output token, ms", "tpot_ms")
LEAST, MOST = Column("fastest round, ms", "least_ms"), Column("slowest round, ms", "most_ms")
P90 = Column("9 of 10 within, ms", "tpot_p90_ms")
OF_BF16 = Column("of BF16's time", "of_bf16")
TTFT = Column("time to first token, ms", "ttft_ms")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
USED = megabytes("bytes of a token's experts", "used_bytes_per_token")
EXPERTS = gibibytes("all experts", "experts_bytes")
SLOTS = share("experts that slots hold", "slots_share")
HITS = share("hit rate", "hit_rate")
SAMPLES = Column("samples", "samples")
FIGURES = (TPOT, P90, OF_BF16, TTFT, MOVED, USED, EXPERTS, SLOTS, HITS, STOLEN, SAMPLES)


def panels(report: Row) -> list[Panel]:
    """Times and bytes moved over budgets, and what experts take in each format."""
    rows = rows_of(report, (BUDGET, FORMAT, CODEC, DTYPE, *FIGURES))
    for row, times in zip(rows, numbers_of(report, "round_tpot_ms"), strict=True):
        row["least_ms"], row["most_ms"] = (min(times), max(times)) if times else (None, None)
    first = [[row["format"] for row in rows].index(name) for name in distinct(rows, "format")]
    sizes = [rows[at] for at in first]
    return [
        picture(
            "tpot",
            "Time per output token",
            "Lower is faster: points are medians over all texts, and error bars go from the "
            "fastest round's median to the slowest round's.",
            by_name(rows, BUDGET, FORMAT, TPOT, LEAST, MOST),
            "points",
            (BUDGET.title, TPOT.title),
            table_of(
                rows,
                (
                    *(BUDGET, FORMAT, CODEC, DTYPE, TPOT, LEAST, MOST, P90, OF_BF16, TTFT),
                    *(SAMPLES, STOLEN),
                ),
            ),
        ),
        picture(
            "moved",
            "Bytes moved per token",
            "Lower is less to wait for: each bar is the median over all texts.",
            by_name(rows, BUDGET, FORMAT, MOVED),
            "bars",
            (BUDGET.title, MOVED.title),
            table_of(rows, (BUDGET, FORMAT, MOVED, USED, SLOTS, HITS)),
        ),
        picture(
            "experts",
            "What experts take",
            "Each bar is all experts of the model, in codes and scales or in words.",
            by_figure(sizes, FORMAT, [("all experts", EXPERTS, None)]),
            "bars",
            (FORMAT.title, "GiB"),
            table_of(sizes, (FORMAT, EXPERTS, USED)),
        ),
    ]


def notes(report: Row) -> list[str]:
    """Failures, and a machine that was disturbed."""
    rows = rows_of(report, (BUDGET, FORMAT, STOLEN, FAILURE))
    said = given_away(rows, "a format")
    return failures(rows, FORMAT) + ([] if said is None else [said])
