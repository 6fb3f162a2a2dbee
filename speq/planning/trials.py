"""Chooses what is measured of the machine before anything is loaded, within half of the budget."""

from collections.abc import Callable
from functools import partial

from speq.devices.device import Accelerator, Processor
from speq.models.opened import Opened
from speq.planning.demand import Budget
from speq.planning.dense import DenseTrial
from speq.planning.device_trial import DeviceTrial
from speq.planning.model_spec import ModelSpec
from speq.planning.processor_trial import ProcessorTrial


def survey_trial(
    opened: Opened, device: Processor | Accelerator, model_spec: ModelSpec, budget: Budget
) -> ProcessorTrial | DeviceTrial:
    """What surveys the machine: how fast experts are moved and run."""
    limit_bytes, dtype = budget.budget_bytes // 2, model_spec.dtype
    if isinstance(device, Processor):
        return ProcessorTrial(opened, dtype, model_spec.draft, budget.readers, limit_bytes)
    return DeviceTrial(opened.store, device, opened.shape, dtype, limit_bytes, budget.graphs)


def dense_trial(opened: Opened, budget: Budget) -> Callable[[], DenseTrial] | None:
    """What times one of a model's own matrices; None on a GPU."""
    if not budget.on_cpu:
        return None
    names = opened.family.names
    return partial(DenseTrial.of, opened.checkpoint, names.is_expert, budget.budget_bytes // 2)
