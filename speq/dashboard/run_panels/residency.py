"""Resident experts, step by step."""

from speq.dashboard.figures import layout
from speq.dashboard.panel import Frames, Panel, Table
from speq.dashboard.run_record import RunRecord


def panel(run: RunRecord) -> Panel:
    held = run.residency
    phases = {step.number: step.phase for step in run.steps}
    labels = [
        f"step {number}" if phases.get(number) == "decode" else f"step {number}, the prompt"
        for number in held.steps
    ]
    return Panel(
        "residency",
        "Experts in slots",
        "Each row is a layer and each cell an expert, after one step; the slider goes through the "
        "steps, and the second map counts how often each expert was requested so far.",
        [],
        layout("expert", "MoE layer"),
        # The page makes the table of the step that is chosen.
        Table((), []),
        absent="" if held.steps else "No step was recorded.",
        frames=Frames(run.layers, run.experts, labels, held.slots, held.used, held.host)
        if held.steps
        else None,
        height_px=max(320, 140 + 10 * run.layers),
    )
