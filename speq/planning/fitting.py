"""Which ways to hold experts fit a budget, and with how many slots."""

from collections.abc import Sequence
from dataclasses import replace

from speq.experts.codec import codec_of
from speq.files.alignment import aligned
from speq.governor.holding import Holding
from speq.planning import memory
from speq.planning.demand import Budget, demand_of
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.subject import Subject

Fitting = tuple[Holding, MemoryPlan]
Refusal = tuple[Holding, BudgetTooSmall]


def fit(subject: Subject, way: Holding, budget: Budget) -> Fitting:
    """A way with its slots and memory. Raises BudgetTooSmall, item by item."""
    made = memory.plan(demand_of(subject, way, budget), budget.budget_bytes, budget.context)
    return replace(way, slots=made.slots), made


def fitted(
    subject: Subject, ways: Sequence[Holding], budget: Budget
) -> tuple[list[Fitting], list[Refusal]]:
    """Plan each way: those that fit, and why others do not."""
    fitting: list[Fitting] = []
    refused: list[Refusal] = []
    for way in ways:
        try:
            fitting.append(fit(subject, way, budget))
        except BudgetTooSmall as error:
            refused.append((way, error))
    return fitting, refused


def least_refusal(refused: Sequence[Refusal]) -> BudgetTooSmall:
    """The refusal of the way that asks for least."""
    return min((error for _, error in refused), key=lambda error: error.needed_bytes)


def smallest(subject: Subject, way: Holding) -> Holding:
    """The way with the smallest slots there can be, where their size is not known yet.

    Experts that are encoded as they are read have sizes that only a pass over all of them tells.
    A plan by the smallest refuses no budget that would do.
    """
    if not (way.encoded and way.estimated):
        return way
    fewest, _ = codec_of(way.codec, subject.codec.shape).record_range
    return replace(way, slot_bytes=aligned(fewest))
