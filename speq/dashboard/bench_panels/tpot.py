"""Panels of `speq bench tpot`: draft lengths and other settings over memory budgets."""

from speq.dashboard.bench_panels.picture import Mark, by_name, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    gibibytes,
    label,
    megabytes,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

BUDGET = label("memory budget", "budget")
LENGTH = label("draft length", "draft_length")
NEIGHBOURS = label("busy neighbours", "neighbours", needed=False)
VARIANT = label("variant", "variant", needed=False)
SETTING = label("setting", "setting")
TPOT = Column("time per output token, ms", "tpot_ms")
P90 = Column("9 of 10 within, ms", "tpot_p90_ms")
TTFT = Column("time to first token, ms", "ttft_ms")
MOVED = megabytes("bytes moved per token", "moved_bytes_per_token")
HITS = share("hit rate", "hit_rate")
ACCEPTED = share("drafted tokens accepted", "acceptance_rate")
HIDDEN = share("transfers hidden behind work", "hidden_share")
SLOTS = gibibytes("slots", "slots_bytes")
STALL = Column("waiting for experts, s", "stall_s")
SET_TO = Column("acceptance that was set", "synthetic_acceptance")
SAMPLES = Column("samples", "samples")
FIGURES = (TPOT, P90, TTFT, MOVED, HITS, ACCEPTED, HIDDEN, SLOTS, STALL, SET_TO, SAMPLES)


def panels(report: Row) -> list[Panel]:
    """Times, bytes, hits and acceptance, over budgets."""
    rows = rows_of(report, (BUDGET, LENGTH, NEIGHBOURS, VARIANT, *FIGURES))
    several = {key: len(distinct(rows, key)) > 1 for key in ("neighbours", "variant")}
    for row in rows:
        row["setting"] = _setting(row, several)
    ends = any(row["tpot_p90_ms"] is not None for row in rows)
    aid = "Lower is faster: each point is the median over texts and rounds"
    aid += ", and its error bar goes up to what 9 of 10 measurements kept within." * ends or "."
    over = "Each bar is the median over texts and rounds"
    return [
        _panel("tpot", "Time per output token", aid, rows, TPOT, "points", P90 if ends else None),
        _panel("moved", "Bytes moved per token", f"{over}; lower is less.", rows, MOVED),
        _panel("ttft", "Time to first token", f"{over}; lower is sooner.", rows, TTFT),
        _panel("hit-rate", "Experts that lay in slots when needed", f"{over}.", rows, HITS),
        _panel("acceptance", "Drafted tokens that were accepted", f"{over}.", rows, ACCEPTED),
    ]


def notes(report: Row) -> list[str]:
    """Whether acceptance was the draft's own."""
    if all(row["synthetic_acceptance"] is None for row in rows_of(report, (SET_TO,))):
        return []
    return ["WHAT-IF: acceptance was set, and is not the draft's own."]


def _setting(row: Row, several: dict[str, bool]) -> str:
    parts = [f"draft length {row['draft_length']}"]
    if several["neighbours"]:
        parts.append(f"{row['neighbours']} neighbours")
    if several["variant"]:
        parts.append(str(row["variant"] or "as it is"))
    return ", ".join(parts)


def _panel(
    name: str,
    title: str,
    aid: str,
    rows: list[Row],
    figure: Column,
    mark: Mark = "bars",
    high: Column | None = None,
) -> Panel:
    beside = (P90, SLOTS, STALL, HIDDEN, SAMPLES) if figure is TPOT else ()
    return picture(
        name,
        title,
        aid,
        by_name(rows, BUDGET, SETTING, figure, high=high),
        mark,
        (BUDGET.title, figure.title),
        table_of(rows, (BUDGET, SETTING, figure, *beside)),
    )
