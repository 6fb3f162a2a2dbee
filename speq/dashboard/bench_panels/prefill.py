"""Panels of `speq bench prefill`: a long prompt beside the floor of link and arithmetic."""

from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, gibibytes, label, rows_of, table_of
from speq.dashboard.panel import Panel

BUDGET = label("memory budget", "budget")
TOKENS, CHUNK = Column("tokens of the prompt", "prompt_tokens"), Column("of a chunk", "chunk")
TTFT, LINK = Column("time to first token, s", "ttft_s"), Column("link, s", "link_s")
RESIDENT, STALL = Column("all in memory, s", "resident_s"), Column("waiting, s", "stall_s")
FLOOR = Column("of the floor", "floor_ratio")
MOVED, DISTINCT = gibibytes("moved", "moved_bytes"), gibibytes("distinct", "distinct_bytes")
SAMPLES = Column("samples", "samples")


def panels(report: Row) -> list[Panel]:
    """Times and bytes of a prompt, over budgets."""
    columns = (
        *(BUDGET, TOKENS, CHUNK, TTFT, LINK, RESIDENT, FLOOR, STALL, MOVED, DISTINCT, SAMPLES),
    )
    rows = rows_of(report, columns)
    return [
        picture(
            "ttft",
            "Time to first token of a long prompt",
            "No run can be faster than the longer of its two other bars: moving the bytes, and "
            "computing with all experts in memory.",
            by_figure(
                rows,
                BUDGET,
                [
                    ("time to first token", TTFT, "@prefill"),
                    ("the link for the same bytes", LINK, "@transfer"),
                    ("with all experts in memory", RESIDENT, "@expected"),
                ],
            ),
            "bars",
            (BUDGET.title, "time, s"),
            table_of(rows, (BUDGET, TOKENS, CHUNK, TTFT, LINK, RESIDENT, FLOOR, STALL, SAMPLES)),
        ),
        picture(
            "moved",
            "Bytes that a prompt moves",
            "Where the first bar is higher than the second, experts are moved more than once.",
            by_figure(
                rows,
                BUDGET,
                [
                    ("moved", MOVED, "@transfer"),
                    ("of the experts it uses", DISTINCT, "@expected"),
                ],
            ),
            "bars",
            (BUDGET.title, "bytes, GiB"),
            table_of(rows, (BUDGET, CHUNK, MOVED, DISTINCT)),
        ),
    ]
