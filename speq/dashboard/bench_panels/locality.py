"""Panels of `speq bench locality`: misses that plans count with, beside those of real policies."""

from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, distinct, label, rows_of, table_of
from speq.dashboard.panel import Panel

TOKENS = label("tokens of a verification", "tokens")
DISTINCT = Column("distinct experts", "distinct")
SLOTS = Column("slots of a layer", "slots", needed=True)
LRU, LOOKAHEAD = Column("LRU, replayed", "lru"), Column("lookahead, replayed", "lookahead")
BY_CURVE = Column("expected by the curve", "by_curve")
INDEPENDENT = Column("expected of independent tokens", "independent")
COUNTS = (LRU, LOOKAHEAD, BY_CURVE, INDEPENDENT)


def panels(report: Row) -> list[Panel]:
    """Misses over slots, a panel for each number of tokens."""
    columns = (TOKENS, DISTINCT, SLOTS, *COUNTS)
    rows = rows_of(report, columns)
    found = []
    for tokens in distinct(rows, "tokens"):
        mine = [row for row in rows if row["tokens"] == tokens]
        found.append(
            picture(
                "misses",
                f"Misses of a layer and pass over {tokens} tokens",
                "Plans expect well where the curve's line lies near those that were replayed.",
                by_figure(mine, SLOTS, [(each.title, each, None) for each in COUNTS]),
                "lines",
                (SLOTS.title, "experts missed"),
                table_of(mine, columns),
            )
        )
    return found
