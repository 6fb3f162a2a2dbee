"""Bytes moved, by cause."""

from speq.dashboard.figures import bars, layout
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord

MIB = 1 << 20


def panel(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    numbers = [step.number for step in decode]
    figures = [step.figures for step in decode]
    # An expert of rejected tokens may have been prefetched or loaded on demand: it has markers.
    ahead = [each["ahead_bytes"] / MIB for each in figures]
    demand = [(each["moved_bytes"] - each["ahead_bytes"]) / MIB for each in figures]
    rejected = [each["rejected_bytes"] / MIB for each in figures]
    moved = sum(ahead) + sum(demand)
    data = [
        bars("prefetched", numbers, ahead, "hidden", ""),
        bars("on demand", numbers, demand, "stall", "/"),
        {
            "type": "scatter",
            "name": "of both, for rejected tokens only",
            "x": numbers,
            "y": rejected,
            "mode": "markers",
            "marker": {"color": "@text", "symbol": "line-ew-open", "size": 9},
        },
    ]
    return Panel(
        "bytes",
        "Bytes moved by cause",
        "A bar shows the bytes that one step loaded into slots; a mark shows how many of them were "
        "only for rejected tokens of the draft.",
        data if moved else [],
        layout("step", "MiB moved", barmode="stack", bargap=0.15),
        Table(
            (
                *("step", "prefetched (bytes)", "on demand (bytes)"),
                *("for rejected tokens (bytes)", "read from disk (bytes)", "emitted tokens"),
            ),
            [
                [
                    step.number,
                    each["ahead_bytes"],
                    each["moved_bytes"] - each["ahead_bytes"],
                    each["rejected_bytes"],
                    each["read_bytes"],
                    each["emitted"],
                ]
                for step, each in zip(decode, figures, strict=True)
            ],
        ),
        absent=""
        if moved
        else "No expert was moved in decode: all requested experts were in slots.",
    )
