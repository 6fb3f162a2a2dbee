"""Panels of `speq check --json`: the exact path beside plain transformers, and the draft."""

from speq.dashboard.bench_panels import plain
from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, share, table_of
from speq.dashboard.panel import Panel

TEXT, TOKENS = label("text", "text"), Column("tokens", "tokens")
AGREEMENT = share("same token", "agreement")
DRAFT = share("draft: same token", "draft_agreement")
RECALL = share("route recall", "route_recall")
SETS = share("same experts", "same_route_sets")
DIFFERENCE = Column("largest difference of a logit", "max_logit_difference")
LOGIT = Column("largest logit", "max_logit")


def panels(report: Row) -> list[Panel]:
    """Agreement and differences, text by text; of a pack that was checked, its row."""
    columns = (TOKENS, AGREEMENT, DRAFT, RECALL, SETS, DIFFERENCE, LOGIT)
    rows = rows_of(report, columns)
    if all(row["agreement"] is None for row in rows):
        return plain.panels(report)
    for number, row in enumerate(rows, start=1):
        row["text"] = number
    shares: list[tuple[str, Column, str | None]] = [
        ("exact: same token", AGREEMENT, "@exact"),
        ("draft: same token", DRAFT, "@draft"),
        ("draft: route recall", RECALL, "@accepted"),
    ]
    return [
        picture(
            "agreement",
            "Tokens and experts that are plain transformers' own",
            "The exact model must be at 100% in float32, and the draft may be below.",
            by_figure(rows, TEXT, shares),
            "points",
            (TEXT.title, "share, %"),
            table_of(rows, (TEXT, TOKENS, AGREEMENT, DRAFT, RECALL, SETS)),
        ),
        picture(
            "difference",
            "Largest difference of a logit",
            "Differences are rounding where they stay far below the largest logit in the table.",
            by_figure(rows, TEXT, [(DIFFERENCE.title, DIFFERENCE, None)]),
            "bars",
            (TEXT.title, DIFFERENCE.title),
            table_of(rows, (TEXT, TOKENS, DIFFERENCE, LOGIT)),
        ),
    ]
