"""Panels of `speq bench memory`: a draft and its target as they share more (MoE-SpeQ's Table 2)."""

from speq.dashboard.bench_panels.picture import by_figure, picture, slug
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    gibibytes,
    label,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel

MODEL, SIZES = label("model", "model"), label("sizes", "sizes", needed=False)
EXPERTS, SCENARIO = label("experts counted", "experts"), label("what is shared", "scenario")
DRAFT, TARGET = gibibytes("draft", "draft_bytes"), gibibytes("target", "target_bytes")
SHARED, TOTAL = gibibytes("shared", "shared_bytes"), gibibytes("all", "total_bytes")
OF_INDEPENDENT = share("of two models that share nothing", "of_independent")
COLUMNS: tuple[Column, ...] = (
    *(MODEL, SIZES, EXPERTS, SCENARIO),
    *(DRAFT, TARGET, SHARED, TOTAL, OF_INDEPENDENT),
)
# How experts were counted, as a title says it.
COUNTED = {
    "token": "experts of one token in both",
    "resident": "all experts in the draft",
    "all": "all experts in both",
}


def panels(report: Row) -> list[Panel]:
    """A panel for each model and way to count experts."""
    rows = rows_of(report, COLUMNS)
    kinds = dict.fromkeys((row["model"], row["experts"]) for row in rows)
    return [
        _panel(model, way, [row for row in rows if (row["model"], row["experts"]) == (model, way)])
        for model, way in kinds
    ]


def _panel(model: str, way: str, rows: list[Row]) -> Panel:
    return picture(
        f"memory-{slug(model)}-{slug(way)}",
        f"Memory of draft and target, {model}: {COUNTED.get(way, way)}",
        "A bar is all memory, from its bottom: the draft's own, the target's own, and what both "
        "share.",
        by_figure(
            rows,
            SCENARIO,
            [
                ("draft", DRAFT, "@draft"),
                ("target", TARGET, "@verify"),
                ("shared", SHARED, "@rest"),
            ],
        ),
        "stack",
        (SCENARIO.title, "memory, GiB"),
        table_of(rows, COLUMNS),
    )
