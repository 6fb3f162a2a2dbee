"""Pictures of a fidelity report."""

from pathlib import Path
from typing import Any

from speq.measure.report import check_picture, write_picture

# MoE-SpeQ's Figures 5 and 6, and how both go on along a draft.
ACTIVATION, MATCHES, DRAFT = "activation.html", "matches.html", "draft.html"
Rows = list[dict[str, Any]]


def check(folder: Path, force: bool) -> None:
    """Refuse before minutes are spent measuring."""
    for name in (ACTIVATION, MATCHES, DRAFT):
        check_picture(folder / name, force)


def write(folder: Path, model: str, rows: Rows, positions: Rows) -> None:
    """Draw the rows of a report into `folder`. Raises SpeqError where that cannot be done."""
    layers = [row for row in rows if row["layer"] != "all"]
    figures = {
        ACTIVATION: activation(model, layers),
        MATCHES: matches(model, layers),
        DRAFT: along_a_draft(model, positions),
    }
    for name, figure in figures.items():
        write_picture(folder / name, figure)


def activation(model: str, layers: Rows) -> Any:
    """Figure 5: the share of tokens that choose each expert, and each layer's entropy."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    numbers = [row["layer"] for row in layers]
    experts = len(layers[0]["activations"])
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.65, 0.35],
        horizontal_spacing=0.15,  # with room for the colours' key
        subplot_titles=(
            "share of tokens that choose an expert",
            f"entropy of the choice, in bits of {experts} experts",
        ),
    )
    figure.add_trace(
        graph_objects.Heatmap(
            z=[[count / row["pairs"] for count in row["activations"]] for row in layers],
            y=numbers,
            colorscale="Viridis",
            zmin=0,
            colorbar={"x": 0.56, "tickformat": ".0%"},
        ),
        row=1,
        col=1,
    )
    bits = [row["entropy_bits"] for row in layers]
    figure.add_trace(graph_objects.Bar(x=numbers, y=bits, showlegend=False), row=1, col=2)
    share = layers[0]["entropy_share"]
    if share:
        most = layers[0]["entropy_bits"] / share
        figure.add_hline(y=most, line_dash="dash", annotation_text="evenly spread", row=1, col=2)
    figure.update_xaxes(title="expert", row=1, col=1)
    figure.update_yaxes(title="layer", autorange="reversed", row=1, col=1)
    figure.update_xaxes(title="layer", row=1, col=2)
    figure.update_layout(title=f"{model}: which experts are used")
    return figure


def matches(model: str, layers: Rows) -> Any:
    """Figure 6: how often the draft chooses the exact model's experts."""
    from plotly import graph_objects

    names = {
        "hard": "hard: same experts, same order",
        "soft": "soft: same experts, another order",
        "mismatch": "mismatch: another expert",
    }
    numbers = [row["layer"] for row in layers]
    figure = graph_objects.Figure(
        [
            graph_objects.Bar(name=title, x=numbers, y=[row[name] for row in layers])
            for name, title in names.items()
        ]
    )
    figure.update_layout(
        barmode="stack",
        title=f"{model}: experts chosen by the draft and by the exact model",
        xaxis={"title": "layer"},
        yaxis={"title": "share of tokens", "tickformat": ".0%"},
    )
    return figure


def along_a_draft(model: str, positions: Rows) -> Any:
    """Route recall and acceptance by position."""
    from plotly import graph_objects

    names = {
        "forced_recall": "route recall, teacher-forced",
        "recall": "route recall, all drafted tokens",
        "accepted_recall": "route recall, accepted tokens",
        "accepted": "token accepted",
    }
    at = [row["position"] for row in positions]
    figure = graph_objects.Figure(
        [
            graph_objects.Scatter(
                name=title, x=at, y=[row[name] for row in positions], mode="lines+markers"
            )
            for name, title in names.items()
        ]
    )
    figure.update_layout(
        title=f"{model}: what a draft knows, position by position",
        xaxis={"title": "position in the draft", "dtick": 1},
        yaxis={"title": "share", "tickformat": ".0%", "rangemode": "tozero"},
    )
    return figure
