"""Panels of `speq bench fidelity`: MoE-SpeQ's Figures 5 and 6, and how both go on along a draft."""

from speq.dashboard.bench_panels.picture import by_figure, heat_map, picture
from speq.dashboard.bench_panels.rows import (
    Column,
    Row,
    further_rows,
    label,
    numbers_of,
    rows_of,
    share,
    table_of,
)
from speq.dashboard.panel import Panel, Table

LAYER, PAIRS = label("layer", "layer"), Column("tokens", "pairs")
HARD = share("hard: same experts, same order", "hard")
SOFT = share("soft: same experts, another order", "soft")
MISMATCH = share("mismatch: another expert", "mismatch")
RECALL = share("route recall", "recall")
BITS = Column("entropy, bits", "entropy_bits")
OF_ALL = share("of the most there can be", "entropy_share")
EVEN = Column("evenly spread, bits", "even_bits")
POSITION = Column("position in the draft", "position", needed=True)
FORCED = share("route recall, teacher-forced", "forced_recall")
ACCEPTED_RECALL = share("route recall, accepted tokens", "accepted_recall")
DRAFTS = Column("drafts", "drafts")
ACCEPTED = share("token accepted", "accepted")
AFTER = share("accepted where those before were", "accepted_after")
ALL = "all"


def panels(report: Row) -> list[Panel]:
    """Which experts are used, how often the draft chooses the same, and how far ahead."""
    columns = (LAYER, PAIRS, HARD, SOFT, MISMATCH, RECALL, BITS, OF_ALL)
    rows = rows_of(report, columns)
    for row, activations in zip(rows, numbers_of(report, "activations"), strict=True):
        row["activations"] = activations
        bits, of_all = row["entropy_bits"], row["entropy_share"]
        row["even_bits"] = bits / of_all * 100 if bits and of_all else None
    layers = [row for row in rows if row["layer"] != ALL]
    matches = picture(
        "matches",
        "Experts chosen by the draft and by the exact model",
        "The taller the lowest part of a bar, the more tokens draw the same experts in the same "
        "order.",
        by_figure(layers, LAYER, [(each.title, each, None) for each in (HARD, SOFT, MISMATCH)]),
        "stack",
        (LAYER.title, "tokens, %"),
        table_of(rows, (LAYER, PAIRS, HARD, SOFT, MISMATCH, RECALL)),
    )
    return [_activation(layers), _entropy(layers, rows), matches, _along_a_draft(report)]


def notes(report: Row) -> list[str]:
    """What both models make of the texts' next tokens."""
    columns = (Column("tokens", "tokens"), share("agreement", "agreement"))
    perplexities = (Column("", "exact_perplexity"), Column("", "draft_perplexity"))
    rows = further_rows(report, (*columns, *perplexities), "texts")
    return [
        f"Of {row['tokens']} tokens the draft's likeliest next one is the exact model's in "
        f"{row['agreement']:.1f}%; perplexity is {row['draft_perplexity']:.3f} with the draft and "
        f"{row['exact_perplexity']:.3f} without."
        for row in rows
        if None not in row.values()
    ]


def _activation(layers: list[Row]) -> Panel:
    """Figure 5."""
    title, aid = (
        "Which experts are used",
        "Each cell is the share of tokens that choose an expert in a layer, and fuller is more.",
    )
    shares = [
        [100 * count / row["pairs"] for count in row["activations"]]
        if row["activations"] and row["pairs"]
        else []
        for row in layers
    ]
    most = max(map(len, shares), default=0)
    columns = ("layer", *(f"expert {expert}, %" for expert in range(most)))
    cells = [
        [row["layer"], *line] + [None] * (most - len(line))
        for row, line in zip(layers, shares, strict=True)
    ]
    table = Table(columns, cells)
    if not most:
        said = "The file does not say which experts were chosen."
        return Panel("activation", title, aid, [], {}, table, absent=said)
    numbers = [row["layer"] for row in layers]
    trace = {"z": shares, "y": numbers, "zmin": 0, "colorbar": {"title": {"text": "tokens, %"}}}
    axes = ("expert", LAYER.title)
    return heat_map("activation", title, aid, trace, axes, table, autorange="reversed", dtick=1)


def _entropy(layers: list[Row], rows: list[Row]) -> Panel:
    """Figure 5's second half."""
    return picture(
        "entropy",
        "How evenly experts are used",
        "The nearer a layer comes to the upper line, the more evenly its tokens use all experts.",
        by_figure(
            layers, LAYER, [("entropy of the choice", BITS, "@1"), ("evenly spread", EVEN, "@2")]
        ),
        "lines",
        (LAYER.title, BITS.title),
        table_of(rows, (LAYER, BITS, EVEN, OF_ALL)),
    )


def _along_a_draft(report: Row) -> Panel:
    columns = (POSITION, DRAFTS, FORCED, RECALL, ACCEPTED_RECALL, ACCEPTED, AFTER)
    rows = further_rows(report, columns, "positions")
    lines: list[tuple[str, Column, str | None]] = [
        (FORCED.title, FORCED, None),
        ("route recall, all drafted tokens", RECALL, None),
        (ACCEPTED_RECALL.title, ACCEPTED_RECALL, None),
        (ACCEPTED.title, ACCEPTED, None),
    ]
    return picture(
        "draft",
        "What a draft knows, position by position",
        "Where a line falls, reading experts ahead by that position's route is worth less.",
        by_figure(rows, POSITION, lines),
        "lines",
        (POSITION.title, "share, %"),
        table_of(rows, columns),
    )
