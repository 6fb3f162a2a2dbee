"""Options that several benches of the lab share."""

from dataclasses import fields
from typing import Annotated

from speq.bench.settings import numbers
from speq.config import MAX_DRAFT_LENGTH, RunConfig
from speq.options.declared import Option
from speq.options.kinds import Size, Text, Whole

BudgetText = Annotated[
    str, Option("Memory for everything on the device, such as 8GiB.", Size(kept=True))
]
RecordingBudget = Annotated[
    str, Option("Room for all experts and the draft, to record routes in.", Size(kept=True))
]
FixedLength = Annotated[int, Option("Tokens drafted per step.", Whole(1, MAX_DRAFT_LENGTH))]
FixedLengths = Annotated[
    tuple[int, ...], Option("Draft lengths.", numbers(Whole(1, MAX_DRAFT_LENGTH), "2,4"))
]
# Packs hold no plain words of experts.
Published = Annotated[
    str | None,
    Option(
        "Where the model is packed: the same as published, for what runs on plain words.",
        Text("a folder or a hub id", path=True),
    ),
]
# Of a budget's own options there are as many as a bench compares.
BUDGET_OPTIONS = tuple(each.name for each in fields(RunConfig) if each.name.startswith("expert_"))
