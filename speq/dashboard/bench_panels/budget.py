"""Panels of `speq bench budget`: quality against bytes and time (MoE-Spec, Figures 3 to 6)."""

from speq.dashboard.bench_panels.picture import Series, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, share, table_of
from speq.dashboard.panel import Panel

RANKING = label("ranked by", "ranking")
POLICY, RESIDENTS = label("policy", "policy", False), label("residents", "residents", False)
EXPERTS = Column("experts of a layer, at most", "experts")
FLOOR = Column("least share of the routing weight", "floor")
MOVED = Column("experts moved per token", "moved")
DROPPED = share("routing weight dropped", "dropped_share")
NATS = Column("nats added per token", "nats_added")
NATS_ERROR = Column("its standard error", "nats_added_error")
KL = Column("KL divergence, nats", "kl")
SAME = share("same likeliest token", "same_token")
ERROR = share("layers' outputs off", "reconstruction_error")
TPOT = Column("time per output token, ms", "tpot_ms")
OF_EXACT = Column("time, of the exact model's", "tpot_of_exact")
LENGTH = Column("tokens of a step", "accept_length")
SELECT = share("time in selection", "select_share")
ROUGE = Column("ROUGE-L", "rouge_l")
COLUMNS = (
    *(RANKING, POLICY, RESIDENTS, EXPERTS, FLOOR, MOVED, DROPPED, NATS, NATS_ERROR, KL, SAME),
    *(ERROR, TPOT, OF_EXACT, LENGTH, SELECT, ROUGE),
)
EXACT = "exact"


def panels(report: Row) -> list[Panel]:
    """Curves of budgets, one for each way to rank and to go without. Texts need not be gone on
    with, nor layers reconstructed: there is no picture of what was not asked for.
    """
    rows = rows_of(report, COLUMNS)
    pictures = [
        curves("nats", "What bytes buy: nats", rows, MOVED, NATS, "nearer to both axes"),
        curves(
            "same", "What bytes buy: the same token", rows, MOVED, SAME, "higher and to the left"
        ),
        curves("dropped", "Routing weight dropped", rows, MOVED, DROPPED, "nearer to both axes"),
        curves("time", "What time buys", rows, OF_EXACT, NATS, "nearer to both axes"),
        curves("rouge", "Texts gone on with", rows, OF_EXACT, ROUGE, "higher and to the left"),
        curves("error", "How far layers are off", rows, EXPERTS, ERROR, "lower"),
        curves("length", "Tokens of a step", rows, EXPERTS, LENGTH, "higher"),
    ]
    return [panel for panel in pictures if not panel.absent]


def curves(
    name: str, title: str, rows: list[Row], across: Column, figure: Column, better: str
) -> Panel:
    """One figure over another, budgets of one way joined; the exact model is a point."""
    series = []
    for way in dict.fromkeys(map(way_of, rows)):
        mine = [
            row
            for row in rows
            if way_of(row) == way and None not in (row[across.key], row[figure.key])
        ]
        mine.sort(key=lambda row: row[across.key])
        x, y = ([row[column.key] for row in mine] for column in (across, figure))
        series.append(Series(way, x, y))
    aid = f"A budget is better where its point lies {better}."
    axes = across.title, figure.title
    return picture(name, title, aid, series, "lines", axes, table_of(rows, COLUMNS))


def way_of(row: Row) -> str:
    if row["ranking"] == EXACT:
        return EXACT
    bound = "by number" if row["floor"] is None else "by share"
    return f"{row['ranking']}, {row['policy']}, residents {row['residents']}, {bound}"
