"""Panels of `speq bench governor-sim`: the governor against fixed lengths on simulated machines."""

from speq.dashboard.bench_panels.picture import Series, picture
from speq.dashboard.bench_panels.rows import Column, Row, further_rows, rows_of, share, table_of
from speq.dashboard.panel import Panel

SETTINGS = Column("settings", "settings")
OF_BEST = share("within 3% of the best draft length", "within_3_percent_of_best")
OF_PLAIN = share("within 3% of no draft, or faster", "within_3_percent_of_plain")
MEAN, WORST = Column("mean, of the best", "mean"), Column("worst, of the best", "worst")
SEED, DECISION = Column("its seed", "worst_seed"), Column("a decision, us", "decision_us")
COLUMNS = (SETTINGS, OF_BEST, OF_PLAIN, MEAN, WORST, SEED, DECISION)
VERDICTS = (
    Column("seed", "seed"),
    Column("of the best draft length's time", "of_best", needed=True),
    Column("of plain decoding's time", "of_plain", needed=True),
)


def panels(report: Row) -> list[Panel]:
    """Shares of settings, and each setting's verdict where it was kept."""
    rows = rows_of(report, COLUMNS)
    (summary, *_) = rows
    shares = [column for column in (OF_BEST, OF_PLAIN) if summary[column.key] is not None]
    within = picture(
        "within",
        "Settings in which the governor was near the best",
        "The nearer a bar comes to 100%, the more simulated settings the governor did well in.",
        [Series("settings", [each.title for each in shares], [summary[c.key] for c in shares])],
        "bars",
        ("governor's time", "settings, %"),
        table_of(rows, COLUMNS),
    )
    verdicts = further_rows(report, VERDICTS, "verdicts")
    lines = []
    for column in VERDICTS[1:]:
        figures = sorted(row[column.key] for row in verdicts)
        lines.append(Series(column.title, [*range(1, len(figures) + 1)], figures))
    each = picture(
        "verdicts",
        "Each setting's time beside the best",
        "Settings stand in the order of their ratios, and above 1 the governor was slower.",
        lines,
        "lines",
        ("settings, from the best to the worst", "governor's time, as a multiple"),
        table_of(verdicts, VERDICTS),
        "The file keeps no single settings; --verdicts keeps them.",
    )
    return [within, each]
