"""The memory budget, item by item."""

from speq.dashboard.figures import PATTERNS, bars, layout
from speq.dashboard.panel import Cell, Panel, Table
from speq.dashboard.run_record import RunRecord

MIB = 1 << 20
# Items outside the budget.
OUTSIDE = ("host_records", "host_pinned", "peer_slots")


def panel(run: RunRecord) -> Panel:
    items = {
        name: size
        for name, size in run.memory.items()
        if size and name != "budget" and name not in OUTSIDE
    }
    outside = {name: run.memory[name] for name in OUTSIDE if run.memory.get(name)}
    data = [
        {
            **bars(
                name.replace("_", " "),
                [round(size / MIB, 3)],
                ["budget"],
                "rest" if name == "unused" else str(at % 8 + 1),
                PATTERNS[at % len(PATTERNS)],
            ),
            "orientation": "h",
            "hovertemplate": "%{x:,.1f} MiB<extra>%{fullData.name}</extra>",
        }
        for at, (name, size) in enumerate(items.items())
    ]
    budget = run.memory["budget"]
    rows: list[list[Cell]] = [
        [name.replace("_", " "), size, size / budget] for name, size in items.items()
    ]
    rows += [
        [f"{name.replace('_', ' ')}, outside it", size, None] for name, size in outside.items()
    ]
    return Panel(
        "memory",
        "The memory budget, item by item",
        "The bar is the whole budget, and each part of it is one item.",
        data,
        layout("MiB", "the device's memory", barmode="stack", yaxis_showticklabels=False),
        Table(("item", "bytes", "of the budget"), rows),
        height_px=260,
    )
