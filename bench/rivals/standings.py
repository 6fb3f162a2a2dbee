"""What a table says of systems beside each other."""

import math
from statistics import median
from typing import Any

from speq.bench.rivals.contest import ContestCell, Terms
from speq.bench.rivals.worker import TextRun
from speq.measure.picture import BUDGET, HITS, MOVED, TPOT, TTFT, Axis, Picture, gibibytes
from speq.measure.report import Column
from speq.stats import ratio
from speq.units import format_bytes

# Of the measurements, so many take no longer than `tpot_p90_ms`.
MOST = 0.9
# Above this, a time says more of the machine's other guests than of what was measured.
DISTURBED_SHARE = 0.1
# What speq's own systems count.
COUNTED = (
    "acceptance_rate",
    "hit_rate",
    "moved_bytes_per_token",
    "hidden_share",
    "stall_s",
)
Row = dict[str, Any]

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "system": ("system", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "p90 ms": ("tpot_p90_ms", "{:.1f}"),
    "spread": ("tpot_spread", "{:.0%}"),
    "of best": ("of_best", "{:.2f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "tokens/s": ("tokens_per_s", "{:.1f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "hidden": ("hidden_share", "{:.1%}"),
    "peak": ("peak_bytes", format_bytes),
    "load s": ("load_s", "{:.1f}"),
    "stolen": ("stolen_share", "{:.0%}"),
    "tokens": ("tokens", "{}"),
    "agrees": ("agreement", "{:.1%}"),
}
SYSTEM = (Axis("system", "system"),)
PICTURES = (
    Picture(
        *("tpot", "Time per output token", (BUDGET,), (TPOT,), SYSTEM),
        high="tpot_p90_ms",
        mark="points",
        aid="Lower is faster: an error bar goes up to what 9 of 10 texts kept within.",
    ),
    Picture(
        *("of-best", "Times beside the fastest system's", (BUDGET,)),
        (Axis("of_best", "times the fastest system's"),),
        SYSTEM,
    ),
    Picture("moved", "Bytes moved per token", (BUDGET,), (MOVED,), SYSTEM),
    Picture("ttft", "Time to first token", (BUDGET,), (TTFT,), SYSTEM, mark="points"),
    Picture("hit-rate", "Experts that lay in slots when needed", (BUDGET,), (HITS,), SYSTEM),
    Picture(
        *("memory", "Memory that systems took", (BUDGET,)),
        (gibibytes("peak_bytes", "most memory taken"),),
        SYSTEM,
    ),
)


def rows_of(cells: list[ContestCell], terms: Terms) -> list[Row]:
    """A row for each cell. `of_best` is the time of a token as a multiple of the fastest system's
    under the same budget.
    """
    rows = [row_of(cell, terms) for cell in cells]
    for row in rows:
        beside = [each["tpot_ms"] for each in rows if each["budget"] == row["budget"]]
        best = min((tpot_ms for tpot_ms in beside if tpot_ms is not None), default=None)
        row["of_best"] = None if row["tpot_ms"] is None else ratio(row["tpot_ms"], best or 0.0)
    return rows


def row_of(cell: ContestCell, terms: Terms) -> Row:
    """Medians over prompts and rounds; figures are None of a system that failed."""
    row: Row = {
        "budget": cell.budget,
        "budget_bytes": cell.budget_bytes,
        "cap_bytes": cell.budget_bytes + terms.reserve_bytes if terms.capped else None,
        "neighbours": terms.neighbours,
        "system": cell.entry.label,
        "ours": cell.entry.system.ours,
        "failure": cell.failure,
        "settled": next((each.settled for each in cell.rounds if each.settled), {}),
        "samples": 0,
        "agreement": cell.agreement,
        "by_kind": {},
    } | dict.fromkeys(FIGURES)
    runs = [text for heard in cell.rounds for text in heard.texts]
    if cell.failure or not runs:
        return row
    times = sorted(run.tpot_s * 1e3 for run in runs)
    of_rounds = [median(run.tpot_s * 1e3 for run in heard.texts) for heard in cell.rounds]
    tpot_ms = median(times)
    row |= {
        "samples": len(runs),
        "tpot_ms": tpot_ms,
        "tpot_p90_ms": times[math.ceil(MOST * len(times)) - 1],
        "tpot_spread": (max(of_rounds) - min(of_rounds)) / tpot_ms,
        "round_tpot_ms": of_rounds,
        "ttft_ms": median(run.ttft_s * 1e3 for run in runs),
        "tokens_per_s": 1e3 / tpot_ms,
        "tokens": min(len(run.token_ids) for run in runs),
        "cut": any(run.cut for run in runs),
        "stolen_share": median(run.stolen_share for run in runs),
        "load_s": median(heard.done["load_s"] for heard in cell.rounds),
        "peak_bytes": max(peak_of(heard.done) for heard in cell.rounds),
        "cap_peak_bytes": max(
            (heard.done["cap_peak_bytes"] or 0 for heard in cell.rounds if terms.capped), default=0
        ),
    }
    kinds = {
        kind: [at for at, each in enumerate(terms.kinds) if each == kind] for kind in terms.kinds
    }
    row["by_kind"] = {
        kind: median(heard.texts[at].tpot_s * 1e3 for heard in cell.rounds for at in places)
        for kind, places in kinds.items()
    }
    return row | {name: median_of(name, runs) for name in COUNTED}


FIGURES = (
    *("tpot_ms", "tpot_p90_ms", "tpot_spread", "round_tpot_ms", "of_best", "ttft_ms"),
    *("tokens_per_s", "tokens", "cut", "stolen_share", "load_s", "peak_bytes", "cap_peak_bytes"),
    *COUNTED,
)


def kind_columns(kinds: list[str]) -> dict[str, Column]:
    """Columns of `by_kind`'s rows."""
    first: dict[str, Column] = {"budget": ("budget", "{}"), "system": ("system", "{}")}
    return first | {kind: (kind, "{:.1f}") for kind in kinds}


def by_kind(rows: list[Row]) -> list[Row]:
    """Times of a token by kind of prompt, a row for each system that ran."""
    return [
        {"budget": row["budget"], "system": row["system"]} | row["by_kind"]
        for row in rows
        if row["by_kind"]
    ]


def peak_of(done: dict[str, Any]) -> int:
    """The most memory a process took: of a GPU, or with its page cache, or what it had mapped."""
    peak: int = done["device_peak_bytes"] or done.get("cap_peak_bytes") or done["peak_rss_bytes"]
    return peak


def median_of(name: str, runs: list[TextRun]) -> float | None:
    values = [value for run in runs if (value := run.figures.get(name)) is not None]
    return float(median(values)) if values else None


def notes_of(rows: list[Row]) -> list[str]:
    """What the table has no room for: failures, texts cut short, a machine that was disturbed."""
    lines = [
        f"{row['budget']}, {row['system']}: {row['failure']}" for row in rows if row["failure"]
    ]
    lines += [
        f"{row['budget']}, {row['system']}: texts were ended after {row['tokens']} tokens"
        for row in rows
        if row["cut"]
    ]
    stolen = max((row["stolen_share"] or 0.0 for row in rows), default=0.0)
    if stolen > DISTURBED_SHARE:
        lines.append(
            f"the host gave up to {stolen:.0%} of the processors' time to others; measure again "
            "on a quiet machine"
        )
    return lines
