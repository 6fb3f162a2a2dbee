"""Panels of `speq bench coverage`: MoE-Spec's Figures 2, 4, 7 and 8."""

from dataclasses import replace

from speq.dashboard.bench_panels.picture import by_figure, by_name, heat_map, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    distinct,
    further_rows,
    label,
    numbers_of,
    rows_of,
    share,
    table_of,
    wrong,
)
from speq.dashboard.panel import Panel, Table
from speq.errors import SpeqError

PROMPTS, TOKENS = label("prompts", "prompts"), label("tokens of a window", "tokens")
EXPERTS = Column("experts kept of a layer", "experts", needed=True)
PROBABILITY = share("of the routing probability", "probability")
PROBABILITY_LEAST = share("probability, least layer", "probability_least")
PROBABILITY_MOST = share("probability, most layer", "probability_most")
SERVED = share("of the weight experts were served with", "served")
SERVED_LEAST = share("served weight, least layer", "served_least")
SERVED_MOST = share("served weight, most layer", "served_most")
COVERAGE = (
    *(PROMPTS, TOKENS, EXPERTS),
    *(PROBABILITY, PROBABILITY_LEAST, PROBABILITY_MOST),
    *(SERVED, SERVED_LEAST, SERVED_MOST),
)
SHAPE, ROWS = label("draft", "shape"), Column("rows of a verification", "rows", needed=True)
DISTINCT = Column("distinct experts of a layer", "distinct")
DISTINCT_LEAST = Column("least layer", "distinct_least")
DISTINCT_MOST = Column("most layer", "distinct_most")
OF_TEXT = Column("as many tokens of the text", "of_text")
INDEPENDENT = Column("independent choice", "independent")
UNIQUE = (SHAPE, ROWS, DISTINCT, DISTINCT_LEAST, DISTINCT_MOST, OF_TEXT, INDEPENDENT)
LAYER = label("layer", "layer")
CONCENTRATION = Column("concentration", "concentration")
TOGETHER = Column("tokens with both experts", "together")
EXPECTED = Column("expected of uniform choice", "expected")
LAYERS = (LAYER, CONCENTRATION, TOGETHER, EXPECTED)
ALL = "all"
# Cells of all heat maps; of larger models fewer layers are drawn.
MOST_CELLS = 1 << 16
MAP_PX = 560


def panels(report: Row) -> list[Panel]:
    """Experts by rows, shares by experts and windows, and experts that go together."""
    rows = rows_of(report, COVERAGE)
    last = rows[-1]["prompts"]
    whole = [row for row in rows if row["prompts"] == last]
    windows = [
        _by_window(
            *("probability", "Routing probability", whole),
            *(PROBABILITY, PROBABILITY_LEAST, PROBABILITY_MOST),
        ),
        _by_window(
            *("served", "Weight that was served", whole), *(SERVED, SERVED_LEAST, SERVED_MOST)
        ),
    ]
    kinds = [_by_kind(tokens, rows) for tokens in distinct(rows, "tokens")]
    several = len(distinct(rows, "prompts")) > 1
    layers = further_rows(report, LAYERS, "layers")
    maps = _coactivation(report, layers)
    return [_unique(report), *windows, *(kinds if several else []), _concentration(layers), *maps]


def notes(report: Row) -> list[str]:
    """The mean of concentration, and which layers are not drawn."""
    layers = further_rows(report, LAYERS, "layers")
    mean = [row["concentration"] for row in layers if row["layer"] == ALL]
    of_layers = [row["concentration"] for row in layers if row["layer"] != ALL]
    found = []
    if None not in (*mean, *of_layers) and mean and of_layers:
        found.append(
            f"The strongest pair of a layer is chosen {mean[0]:.1f} times as often as uniform "
            f"choice would have it, on the mean of layers; {min(of_layers):.1f} to "
            f"{max(of_layers):.1f} times."
        )
    drawn = len(_drawn_layers(report, layers))
    if 0 < drawn < len(of_layers):
        found.append(f"Of {len(of_layers)} layers, pairs of {drawn} are drawn.")
    return found


def _unique(report: Row) -> Panel:
    """Figures 2b and 4a."""
    rows = further_rows(report, UNIQUE, "unique")
    series = by_name(rows, ROWS, SHAPE, DISTINCT, DISTINCT_LEAST, DISTINCT_MOST)
    by_rows = sorted(rows, key=lambda row: float(row["rows"]))
    series += by_figure(by_rows, ROWS, [(INDEPENDENT.title, INDEPENDENT, None)])
    trees = [row for row in by_rows if row["of_text"] is not None]
    series += by_figure(trees, ROWS, [(OF_TEXT.title, OF_TEXT, None)])
    return picture(
        "unique",
        "Experts that a verification wants",
        "The lower a line, the fewer experts of a layer a verification of so many rows asks for; "
        "bars go from the layer with least to the one with most.",
        series,
        "lines",
        (ROWS.title, DISTINCT.title),
        table_of(rows, UNIQUE),
    )


def _by_window(
    name: str, what: str, rows: list[Row], figure: Column, least: Column, most: Column
) -> Panel:
    """Figure 2c: a line for each window."""
    lines = by_name(rows, EXPERTS, TOKENS, figure, least, most)
    return picture(
        name,
        f"{what} that the best experts hold, by tokens of a window",
        "The higher a line on the left, the fewer experts hold most of the weight; bars go from "
        "the layer with least to the one with most.",
        [replace(each, name=f"{each.name} tokens") for each in lines],
        "lines",
        (EXPERTS.title, figure.title),
        table_of(rows, COVERAGE),
    )


def _by_kind(tokens: str | float, rows: list[Row]) -> Panel:
    """Figure 7: a line for each kind of prompts."""
    mine = [row for row in rows if row["tokens"] == tokens]
    return picture(
        "kinds",
        f"Routing probability that the best experts hold, by prompts, over {tokens} tokens",
        "Where lines lie apart, some kinds of text keep to fewer experts than others.",
        by_name(mine, EXPERTS, PROMPTS, PROBABILITY),
        "lines",
        (EXPERTS.title, PROBABILITY.title),
        table_of(mine, (PROMPTS, EXPERTS, PROBABILITY)),
    )


def _concentration(layers: list[Row]) -> Panel:
    """Eq. 9."""
    rows = [row for row in layers if row["layer"] != ALL]
    return picture(
        "concentration",
        "How often a layer's strongest pair of experts is chosen together",
        "A bar of 1 is what uniform choice would have, and taller is more concentrated.",
        by_figure(rows, LAYER, [(CONCENTRATION.title, CONCENTRATION, None)]),
        "bars",
        (LAYER.title, "times what uniform choice has"),
        table_of(layers, LAYERS),
    )


def _drawn_layers(report: Row, layers: list[Row]) -> list[tuple[Row, list[float], list[int]]]:
    """Layers with the tokens of their pairs and the order of their experts, spread evenly."""
    if not layers:
        return []
    pairs, orders = (numbers_of(report, key, "layers") for key in ("coactivation", "order"))
    whole = [
        (row, tokens, _order(f"layers[{at}]", tokens, order))
        for at, (row, tokens, order) in enumerate(zip(layers, pairs, orders, strict=True))
        if row["layer"] != ALL and row["expected"] and tokens is not None and order is not None
    ]
    cells = max((len(order) ** 2 for _, _, order in whole), default=1)
    kept = min(max(MOST_CELLS // cells, 1), len(whole))
    return [whole[at * len(whole) // kept] for at in range(kept)]


def _order(place: str, tokens: list[float], order: list[float]) -> list[int]:
    """Raises SpeqError where it is no order of as many experts as there are pairs of."""
    experts = [int(expert) for expert in order]
    if sorted(experts) != [*range(len(order))] or len(experts) < 2:
        raise wrong(f"{place}.order", order, "each expert's number once")
    if len(tokens) != len(experts) * (len(experts) - 1) // 2:
        raise wrong(f"{place}.coactivation", tokens, "a number for each pair of experts")
    return experts


def _coactivation(report: Row, layers: list[Row]) -> list[Panel]:
    """Figure 8: a map of each layer."""
    return [_map(*each) for each in _drawn_layers(report, layers)]


def _map(row: Row, tokens: list[float], order: list[int]) -> Panel:
    names = [str(expert) for expert in order]
    lines: list[list[float | None]] = [
        [_of_pair(one, other, tokens, len(order), row["expected"]) for other in order]
        for one in order
    ]
    table = Table(
        ("expert", *(f"with {name}, times" for name in names)),
        [[name, *line] for name, line in zip(names, lines, strict=True)],
    )
    trace = {
        "z": lines,
        "x": names,
        "y": names,
        "zmin": 0,
        "colorbar": {"title": {"text": "times uniform"}},
    }
    panel = heat_map(
        "together",
        f"Experts chosen together in layer {row['layer']}",
        "Each cell is how often a token chooses both experts, in times of what uniform choice has, "
        "and experts of a full block beside the diagonal go together.",
        trace,
        ("expert", "expert"),
        table,
        autorange="reversed",
        type="category",
    )
    layout = panel.layout | {"xaxis": panel.layout["xaxis"] | {"type": "category"}}
    return replace(panel, layout=layout, height_px=MAP_PX)


def _of_pair(
    one: int, other: int, tokens: list[float], num_experts: int, expected: float
) -> float | None:
    """Tokens of a pair over those expected; pairs lie in the order of their lower expert."""
    if one == other:
        return None
    low, high = sorted((one, other))
    at = low * (2 * num_experts - low - 1) // 2 + high - low - 1
    ratio = tokens[at] / expected
    if not ratio < float("inf"):
        raise SpeqError(f"a pair has {ratio} times what is expected; measure again")
    return ratio
