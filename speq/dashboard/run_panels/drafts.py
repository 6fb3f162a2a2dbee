"""Draft lengths by step, and acceptance and route recall by position."""

from collections import Counter

from speq.dashboard.figures import bars, layout, line, points
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord

# Text for each `speq.governor.draft_length.DecisionReason`.
GROUNDS = {
    "best": "best estimate",
    "probe": "probe, to measure its cost",
    "bound": "limited by an objective or the request's end",
    "forced": "forced by the form of the answer",
    "fixed": "fixed length",
}


def lengths(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    numbers = [step.number for step in decode]
    accepted = [step.figures["accepted"] for step in decode]
    drafted = [step.figures["draft_length"] for step in decode]
    rejected = [length - good for length, good in zip(drafted, accepted, strict=True)]
    reasons = [f"{GROUNDS.get(step.ground, step.ground)}: {step.reason}" for step in decode]
    hover = "step %{x}: %{y}<br>%{customdata}<extra>%{fullData.name}</extra>"
    probes = [step for step in decode if step.ground == "probe"]
    data = [
        bars(
            "accepted", numbers, accepted, "accepted", "", customdata=reasons, hovertemplate=hover
        ),
        bars("rejected", numbers, rejected, "stall", "/", customdata=reasons, hovertemplate=hover),
        points(
            "a probe",
            [step.number for step in probes],
            [step.figures["draft_length"] for step in probes],
            "text",
            "triangle-down-open",
        ),
    ]
    return Panel(
        "draft-lengths",
        "Draft lengths and accepted tokens",
        "A bar shows the length of a step's draft; a triangle marks a probe, a length that the "
        "governor tried to measure its cost.",
        data if any(drafted) else [],
        layout("step", "drafted tokens", barmode="stack", bargap=0.15, yaxis_dtick=1),
        Table(
            ("step", "draft length", "accepted", "emitted", "ground", "reason"),
            [
                [
                    step.number,
                    step.figures["draft_length"],
                    step.figures["accepted"],
                    step.figures["emitted"],
                    step.ground,
                    step.reason,
                ]
                for step in decode
            ],
        ),
        absent="" if any(drafted) else "No step had a draft; the table has the reasons.",
    )


def positions(run: RunRecord) -> Panel:
    """Show acceptance and route recall by position; 0 is the pending token, which has a route."""
    tried: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    named: Counter[int] = Counter()
    choices: Counter[int] = Counter()
    for step in run.steps:
        all_accepted = True
        for at, (kept, names, chosen) in enumerate(step.positions):
            named[at] += names
            choices[at] += chosen
            # A token after a rejected one does not count.
            if at and all_accepted:
                tried[at] += 1
                accepted[at] += kept
            all_accepted = all_accepted and kept
    drafted = sorted(tried)
    known = sorted(at for at in choices if choices[at])
    rates = [accepted[at] / tried[at] for at in drafted]
    recall = [named[at] / choices[at] for at in known]
    data = [
        line("token accepted, if all before it were", drafted, rates, "accepted", "solid"),
        line("experts named by the draft's route", known, recall, "draft", "dash", "square"),
    ]
    rows = sorted({*drafted, *known})
    return Panel(
        "positions",
        "Acceptance and route recall by position",
        "The solid line shows how often a drafted token was accepted, the dashed one the share of "
        "the exact model's experts that the draft's route had named.",
        data if drafted else [],
        layout(
            "position in the draft (0 is the pending token)",
            "share",
            xaxis_dtick=1,
            yaxis_tickformat=".0%",
            yaxis_range=[0, 1.05],
        ),
        Table(
            ("position", "tried", "accepted", "of tried", "choices", "named", "of choices"),
            [
                [
                    at,
                    tried[at] or None,
                    accepted[at] if at in tried else None,
                    accepted[at] / tried[at] if at in tried else None,
                    choices[at] or None,
                    named[at] if choices[at] else None,
                    named[at] / choices[at] if choices[at] else None,
                ]
                for at in rows
            ],
        ),
        absent="" if drafted else "No step had a draft.",
    )
