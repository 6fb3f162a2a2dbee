"""Bytes and time per token over the share of memory, a line for each system."""

from typing import Any

Rows = list[dict[str, Any]]
PANELS = {
    "ratio_to_lru_raw": "bytes moved per token, of LRU raw's",
    "tpot_ms": "time per output token, ms",
}
# The engine's rows are points beside the replay's lines.
MODES = {"replay": "lines+markers", "engine": "markers"}
COLOURS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")


def figure(model: str, rows: Rows) -> Any:
    """Systems in the order of the rows. Those that have no room at an f have no point there."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    systems = list(dict.fromkeys(row["system"] for row in rows))
    parts = list(dict.fromkeys(row["part"] for row in rows))
    page = make_subplots(rows=1, cols=2, subplot_titles=list(PANELS.values()))
    for column, name in enumerate(PANELS, start=1):
        for at, system in enumerate(systems):
            for part in parts:
                mine = [row for row in rows if (row["system"], row["part"]) == (system, part)]
                symbol = {"size": 11, "symbol": "x"} if part == "engine" else {"size": 7}
                page.add_trace(
                    graph_objects.Scatter(
                        name=f"{system}, {part}",
                        x=[row["f"] for row in mine],
                        y=[row[name] for row in mine],
                        mode=MODES[part],
                        marker=symbol | {"color": COLOURS[at % len(COLOURS)]},
                        legendgroup=f"{system}, {part}",
                        showlegend=column == 1,
                    ),
                    row=1,
                    col=column,
                )
    page.update_xaxes(title="memory for experts, of their bytes in plain words", tickformat=".0%")
    page.update_yaxes(rangemode="tozero")
    page.update_layout(title=f"{model}: systems at equal device memory")
    return page
