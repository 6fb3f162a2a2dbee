"""Bytes by the cause they were moved for."""

from speq.dashboard.figures import bars, layout
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord

MIB = 1 << 20


def panel(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    numbers = [step.number for step in decode]
    figures = [step.figures for step in decode]
    # A rejected expert may have been asked for at either time: it is told apart as a line.
    ahead = [each["ahead_bytes"] / MIB for each in figures]
    demand = [(each["moved_bytes"] - each["ahead_bytes"]) / MIB for each in figures]
    rejected = [each["rejected_bytes"] / MIB for each in figures]
    moved = sum(ahead) + sum(demand)
    data = [
        bars("asked for ahead", numbers, ahead, "hidden", ""),
        bars("asked for when needed", numbers, demand, "stall", "/"),
        {
            "type": "scatter",
            "name": "of both, for rejected tokens alone",
            "x": numbers,
            "y": rejected,
            "mode": "markers",
            "marker": {"color": "@text", "symbol": "line-ew-open", "size": 9},
        },
    ]
    return Panel(
        "bytes",
        "Bytes moved by cause",
        "A bar is what one step moved into slots; the marks show how much of it was only for "
        "tokens of the draft that were rejected.",
        data if moved else [],
        layout("step", "MiB moved", barmode="stack", bargap=0.15),
        Table(
            (
                *("step", "ahead (bytes)", "when needed (bytes)"),
                *("for rejected tokens (bytes)", "read from the disk (bytes)", "emitted tokens"),
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
        else "No expert was moved behind the prompt: all that was asked for lay in slots.",
    )
