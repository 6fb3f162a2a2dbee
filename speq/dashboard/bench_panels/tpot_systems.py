"""Panels of `speq bench tpot --systems`: systems beside each other under the same budgets."""

from speq.dashboard.bench_panels.disturbed import FAILURE, STOLEN, failures, given_away
from speq.dashboard.bench_panels.picture import by_name, heat_map, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    figures_of,
    gibibytes,
    label,
    megabytes,
    numbers_of,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

BUDGET, SYSTEM = label("memory budget", "budget"), label("system", "system")
TPOT = Column("time per output token, ms", "tpot_ms")
LEAST, MOST = Column("fastest round, ms", "least_ms"), Column("slowest round, ms", "most_ms")
P90 = Column("9 of 10 within, ms", "tpot_p90_ms")
OF_BEST = Column("of the fastest system's time", "of_best")
TTFT = Column("time to first token, ms", "ttft_ms")
RATE = Column("tokens a second", "tokens_per_s")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
HITS = share("hit rate", "hit_rate")
HIDDEN = share("transfers hidden behind work", "hidden_share")
ACCEPTED = share("drafted tokens accepted", "acceptance_rate")
AGREEMENT = share("tokens as speq's", "agreement")
PEAK = gibibytes("most memory taken", "peak_bytes")
SAMPLES, TOKENS = Column("samples", "samples"), Column("tokens of a text", "tokens")
FIGURES = (
    *(TPOT, P90, OF_BEST, TTFT, RATE, MOVED, HITS, HIDDEN, ACCEPTED, AGREEMENT, PEAK, STOLEN),
    *(SAMPLES, TOKENS, FAILURE),
)


def panels(report: Row) -> list[Panel]:
    """Times, bytes, hits and memory of systems, over budgets."""
    rows = rows_of(report, (BUDGET, SYSTEM, *FIGURES))
    rounds = numbers_of(report, "round_tpot_ms")
    for row, times in zip(rows, rounds, strict=True):
        row["least_ms"], row["most_ms"] = (min(times), max(times)) if times else (None, None)
    kinds = figures_of(report, "by_kind")
    names = list(dict.fromkeys(name for each in kinds for name in each))
    by_kind = [Column(f"{name}, ms", f"by_kind {name}") for name in names]
    for row, times_of in zip(rows, kinds, strict=True):
        row |= {column.key: times_of.get(n) for n, column in zip(names, by_kind, strict=True)}
    of_times = table_of(
        rows, (BUDGET, SYSTEM, TPOT, LEAST, MOST, P90, *by_kind, RATE, AGREEMENT, SAMPLES, STOLEN)
    )
    points = by_name(rows, BUDGET, SYSTEM, TPOT, LEAST, MOST)
    return [
        picture(
            "tpot",
            "Time per output token",
            "Lower is faster: points are medians over all texts, and error bars go from the "
            "fastest round's median to the slowest round's.",
            points,
            "points",
            (BUDGET.title, TPOT.title),
            of_times,
        ),
        _of_best(rows),
        _bars("moved", "Bytes moved per token", "Lower is less to wait for.", rows, MOVED),
        picture(
            "ttft",
            "Time to first token",
            "Lower is sooner: each point is the median over all texts.",
            by_name(rows, BUDGET, SYSTEM, TTFT),
            "points",
            (BUDGET.title, TTFT.title),
            table_of(rows, (BUDGET, SYSTEM, TTFT)),
        ),
        _bars(
            "hit-rate",
            "Experts that lay in slots when they were needed",
            "Higher is better: a request for an expert is a hit where nobody waits for it.",
            rows,
            HITS,
        ),
        _bars(
            "memory",
            "Memory that systems took",
            "Each bar is the most that a process of the system held at any time.",
            rows,
            PEAK,
        ),
    ]


def notes(report: Row) -> list[str]:
    """Failures, texts that were cut, and a machine that was disturbed."""
    rows = rows_of(report, (BUDGET, SYSTEM, STOLEN, FAILURE))
    lines = failures(rows, SYSTEM) + [
        f"Texts of {row['system']} at {row['budget']} were ended before they were complete."
        for row in report["rows"]
        if row.get("cut") is True
    ]
    said = given_away(rows, "a system")
    unknown = "The file does not say what the host gave to other guests meanwhile."
    return [*lines, unknown if said is None else said]


def _of_best(rows: list[Row]) -> Panel:
    budgets, systems = distinct(rows, "budget"), distinct(rows, "system")
    found = {(row["system"], row["budget"]): row["of_best"] for row in rows}
    cells = [[found.get((system, budget)) for budget in budgets] for system in systems]
    title, table = "Times beside the fastest system's", table_of(rows, (BUDGET, SYSTEM, OF_BEST))
    aid = "Each cell is a system's time per token as a multiple of the fastest one's in its column."
    if all(cell is None for line in cells for cell in line):
        said = "The file has no times to compare."
        return Panel("of-best", title, aid, [], {}, table, absent=said)
    return heat_map(
        "of-best",
        title,
        aid,
        {"x": budgets, "y": systems, "z": cells, "zmin": 1, "texttemplate": "%{z:.2f}"},
        (BUDGET.title, SYSTEM.title),
        table,
        autorange="reversed",
        type="category",
    )


def _bars(name: str, title: str, aid: str, rows: list[Row], figure: Column) -> Panel:
    """Of systems that count the figure: other programs count little."""
    return picture(
        name,
        title,
        aid,
        by_name(rows, BUDGET, SYSTEM, figure),
        "bars",
        (BUDGET.title, figure.title),
        table_of(rows, (BUDGET, SYSTEM, figure)),
    )
