"""Panels of `speq bench governor`: fixed draft lengths and auto, by kind of prompt and budget."""

from speq.dashboard.bench_panels.picture import by_name, picture, slug
from speq.dashboard.bench_panels.rows import Column, Row, distinct, label, rows_of, share, table_of
from speq.dashboard.panel import Panel

BUDGET, KIND = label("memory budget", "budget"), label("prompts", "kind")
LENGTH = label("draft length", "draft_length")
TPOT = Column("time per output token, ms", "tpot_ms")
LEAST = Column("least, ms", "tpot_least_ms")
MOST = Column("most, ms", "tpot_most_ms")
OF_BEST = Column("of the best draft length's time", "of_best")
OF_DRAFTING = Column("of the best draft's time", "of_drafting")
MEAN = Column("mean draft length", "draft_length_mean")
ACCEPTED = share("drafted tokens accepted", "acceptance_rate")
FORECAST = share("forecast off by", "forecast_error")
AUTO = "auto"


def panels(report: Row) -> list[Panel]:
    """Times of each budget, and how far auto was from the best."""
    columns = (
        *(BUDGET, KIND, LENGTH, TPOT, LEAST, MOST, OF_BEST, OF_DRAFTING, MEAN, ACCEPTED, FORECAST),
    )
    rows = rows_of(report, columns)
    budgets = distinct(rows, "budget")
    drawn = [
        _times(budget, [row for row in rows if row["budget"] == budget], columns)
        for budget in budgets
    ]
    auto = [row for row in rows if row["draft_length"] == AUTO]
    best = picture(
        "of-best",
        "The governor beside the best fixed draft length",
        "At 1 the governor was as fast as the best length known afterwards, and above 1 slower.",
        by_name(auto, KIND, BUDGET, OF_BEST),
        "points",
        (KIND.title, OF_BEST.title),
        table_of(auto, (BUDGET, KIND, OF_BEST, OF_DRAFTING, MEAN)),
        "The file has no row of auto.",
    )
    forecast = picture(
        "forecast",
        "How far the governor's forecasts were off",
        "Lower is better: the mean difference between a cycle and its forecast, as a share.",
        by_name(auto, KIND, BUDGET, FORECAST),
        "bars",
        (KIND.title, FORECAST.title),
        table_of(auto, (BUDGET, KIND, FORECAST)),
        "The file has no forecast of auto.",
    )
    return [*drawn, best, forecast]


def _times(budget: str, rows: list[Row], columns: tuple[Column, ...]) -> Panel:
    return picture(
        f"tpot-{slug(budget)}",
        f"Time per output token, {budget}",
        "Lower is faster: points are medians over rounds, and error bars go from the least to the "
        "most.",
        by_name(rows, LENGTH, KIND, TPOT, LEAST, MOST),
        "points",
        (LENGTH.title, TPOT.title),
        table_of(rows, columns),
    )
