"""Which ways to hold experts fit a budget, and with how many slots."""

from collections.abc import Sequence
from dataclasses import replace

from speq.experts.codec import codec_of
from speq.files.alignment import align
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget, demand_of
from speq.planning.memory import BudgetTooSmall, MemoryPlan, plan_memory
from speq.planning.model_spec import ModelSpec

FittingPlan = tuple[ResidencyPlan, MemoryPlan]
Refusal = tuple[ResidencyPlan, BudgetTooSmall]


def fit(model_spec: ModelSpec, way: ResidencyPlan, budget: Budget) -> FittingPlan:
    """A way with its slots and memory. Raises BudgetTooSmall, item by item."""
    made = plan_memory(demand_of(model_spec, way, budget), budget.budget_bytes, budget.context)
    return replace(way, slots=made.slots), made


def fit_all(
    model_spec: ModelSpec, candidates: Sequence[ResidencyPlan], budget: Budget
) -> tuple[list[FittingPlan], list[Refusal]]:
    """Plan each way: those that fit, and why others do not."""
    fitting: list[FittingPlan] = []
    refused: list[Refusal] = []
    for way in candidates:
        try:
            fitting.append(fit(model_spec, way, budget))
        except BudgetTooSmall as error:
            refused.append((way, error))
    return fitting, refused


def holds_all(model_spec: ModelSpec, candidates: Sequence[ResidencyPlan], budget: Budget) -> bool:
    """True if one of the ways has slots for all experts."""
    fitting, _ = fit_all(model_spec, candidates, budget)
    return any(memory.slots >= model_spec.count for _, memory in fitting)


def least_refusal(refused: Sequence[Refusal]) -> BudgetTooSmall:
    """The refusal of the way that asks for least."""
    return min((error for _, error in refused), key=lambda error: error.needed_bytes)


def smallest(model_spec: ModelSpec, way: ResidencyPlan) -> ResidencyPlan:
    """The way with the smallest slots there can be, where their size is not known yet.

    That of experts that are encoded as they are read is known once some are encoded. A plan by the
    smallest refuses no budget that would do.
    """
    if not (way.encoded and way.estimated):
        return way
    fewest, _ = codec_of(way.codec, model_spec.codec.shape).record_range
    return replace(way, slot_bytes=align(fewest))
