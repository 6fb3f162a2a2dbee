"""Rows of systems at equal memory, and what was aimed at beside what was found."""

from collections.abc import Mapping
from typing import Any

from speq.bench.paper.candidates import Standing
from speq.measure.report import Column
from speq.stats import ratio
from speq.units import format_bytes

# Of draft and raw slots' bytes, those with residual ones; of the best row's time, auto's, beside
# that row's spread; of plain LRU's bytes, auto's, where LRU's link takes longer than its compute.
RESIDUAL_BYTES, AUTO_TIME, AUTO_BYTES = 0.7, 1.03, 0.6

COLUMNS: dict[str, Column] = {
    "part": ("part", "{}"),
    "f": ("f", "{}"),
    "system": ("system", "{}"),
    "codec": ("codec", "{}"),
    "k": ("draft_length", "{}"),
    "eviction": ("cache_policy", "{}"),
    "slots": ("slots", "{}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "of LRU raw's": ("ratio_to_lru_raw", "{:.2f}"),
    "rejected": ("rejected_bytes_per_token", format_bytes),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "spread": ("tpot_spread", "{:.1%}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
}
AIM_COLUMNS: dict[str, Column] = {
    "part": ("part", "{}"),
    "f": ("f", "{}"),
    "aim": ("aim", "{}"),
    "found": ("found", "{:.3f}"),
    "at most": ("limit", "{:.3f}"),
    "": ("met", lambda met: "met" if met else "MISSED"),
}
# What a row says of a system that fits.
FIGURES = (
    "codec",
    "draft_length",
    "cache_policy",
    "prefetch",
    "moved_bytes_per_token",
    "ratio_to_lru_raw",
    "rejected_bytes_per_token",
    "tpot_ms",
    "tpot_spread",
    "compute_ms",
    "link_ms",
    "acceptance_rate",
)
Row = dict[str, Any]


def rows_of(part: str, fraction: float, standings: Mapping[str, Standing]) -> list[Row]:
    """A row for each system. Figures of one that has no room are None."""
    lru = standings["LRU raw"]
    return [row_of(part, fraction, name, each, lru) for name, each in standings.items()]


def row_of(part: str, fraction: float, system: str, standing: Standing, lru: Standing) -> Row:
    candidate, outcomes = standing.candidate, standing.outcomes
    row: Row = {
        "part": part,
        "f": fraction,
        "system": system,
        "slots": 0,
        "samples": len(outcomes),
    } | dict.fromkeys(FIGURES)
    if candidate is None:
        return row
    moved_bytes = standing.median("moved_bytes")
    return row | {
        "codec": candidate.codec,
        "draft_length": candidate.draft_length,
        "cache_policy": candidate.cache_policy,
        "prefetch": candidate.prefetch,
        "slots": outcomes[0].slots,
        "moved_bytes_per_token": moved_bytes,
        "ratio_to_lru_raw": ratio(moved_bytes, lru.median("moved_bytes")) if lru.outcomes else None,
        "rejected_bytes_per_token": standing.median("rejected_bytes"),
        "tpot_ms": standing.median("tpot_ms"),
        "tpot_spread": standing.tpot_spread,
        "compute_ms": standing.median("compute_ms"),
        "link_ms": standing.median("link_ms"),
        "acceptance_rate": outcomes[0].acceptance_rate,
    }


def aims_of(rows: list[Row]) -> list[Row]:
    """Of the rows of one part and f; aims for which there is nothing to compare are left out."""
    by_name = {row["system"]: row for row in rows if row["slots"]}
    aims = []

    def aim(name: str, found: float | None, limit: float) -> None:
        if found is not None:
            part, fraction = rows[0]["part"], rows[0]["f"]
            met = found <= limit
            aims.append(
                {"part": part, "f": fraction, "aim": name, "found": found, "limit": limit}
                | {"met": met}
            )

    raw, residual = by_name.get("draft + raw"), by_name.get("draft + residual")
    if raw and residual:
        moved, other = (row["moved_bytes_per_token"] for row in (residual, raw))
        aim("draft + residual, bytes of draft + raw's", ratio(moved, other), RESIDUAL_BYTES)
    auto, lru = by_name.get("auto"), by_name.get("LRU raw")
    if auto:
        best = min(by_name.values(), key=lambda row: row["tpot_ms"])
        found = auto["tpot_ms"] / best["tpot_ms"]
        aim(f"auto, time of the best's ({best['system']})", found, AUTO_TIME + best["tpot_spread"])
    if auto and lru and lru["link_ms"] > lru["compute_ms"]:
        aim("auto, bytes of LRU raw's (link-bound)", auto["ratio_to_lru_raw"], AUTO_BYTES)
    return aims
