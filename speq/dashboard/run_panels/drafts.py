"""Draft lengths step by step, and what drafts know by position."""

from collections import Counter

from speq.dashboard.figures import bars, layout, line, points
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord

# Of grounds that a governor gives (`speq.governor.draft_length.DecisionReason`).
GROUNDS = {
    "best": "the best expected",
    "probe": "to learn what it costs",
    "bound": "a bound left no better",
    "fixed": "as asked for",
}


def lengths(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    numbers = [step.number for step in decode]
    accepted = [step.figures["accepted"] for step in decode]
    drafted = [step.figures["draft_length"] for step in decode]
    rejected = [each - stood for each, stood in zip(drafted, accepted, strict=True)]
    said = [f"{GROUNDS.get(step.ground, step.ground)}: {step.reason}" for step in decode]
    hover = "step %{x}: %{y}<br>%{customdata}<extra>%{fullData.name}</extra>"
    probes = [step for step in decode if step.ground == "probe"]
    data = [
        bars("accepted", numbers, accepted, "accepted", "", customdata=said, hovertemplate=hover),
        bars("rejected", numbers, rejected, "stall", "/", customdata=said, hovertemplate=hover),
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
        "Draft lengths and what became of them",
        "A bar is as high as a step's draft was long; a triangle marks a length that the governor "
        "tried to learn its cost.",
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
        absent="" if any(drafted) else "No step drafted anything; the table has the reasons.",
    )


def positions(run: RunRecord) -> Panel:
    """Position 0 is the pending token, whose route a draft names as well."""
    tried: Counter[int] = Counter()
    stood: Counter[int] = Counter()
    named: Counter[int] = Counter()
    choices: Counter[int] = Counter()
    for step in run.steps:
        reached = True
        for at, (kept, names, chosen) in enumerate(step.positions):
            named[at] += names
            choices[at] += chosen
            # A token behind a rejected one had no chance.
            if at and reached:
                tried[at] += 1
                stood[at] += kept
            reached = reached and kept
    drafted = sorted(tried)
    known = sorted(at for at in choices if choices[at])
    accepted = [stood[at] / tried[at] for at in drafted]
    recall = [named[at] / choices[at] for at in known]
    data = [
        line("token accepted, if all before it were", drafted, accepted, "accepted", "solid"),
        line("experts named by the draft's route", known, recall, "draft", "dash", "square"),
    ]
    rows = sorted({*drafted, *known})
    return Panel(
        "positions",
        "What a draft knows, by position",
        "The solid line is how often a drafted token stood, and the dashed one how many of the "
        "exact model's experts the draft's route had named.",
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
                    stood[at] if at in tried else None,
                    stood[at] / tried[at] if at in tried else None,
                    choices[at] or None,
                    named[at] if choices[at] else None,
                    named[at] / choices[at] if choices[at] else None,
                ]
                for at in rows
            ],
        ),
        absent="" if drafted else "No step drafted anything.",
    )
