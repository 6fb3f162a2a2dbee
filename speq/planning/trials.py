"""Chooses what is measured of the machine before anything is loaded, within half of the budget."""

from collections.abc import Callable
from functools import partial

import torch

from speq.devices.device import Accelerator, Processor
from speq.experts.expert_store import mean_moved_bytes
from speq.models.opened import Opened
from speq.planning.demand import Budget
from speq.planning.dense import DenseTrial
from speq.planning.device_trial import DeviceTrial
from speq.planning.kept_survey import MachineSurvey
from speq.planning.layer_trial import layer_bytes
from speq.planning.model_spec import ModelSpec
from speq.planning.processor_trial import ProcessorTrial
from speq.planning.reader_survey import LEAST_BYTES, store_key
from speq.version import __version__


def machine_survey(
    opened: Opened, device: Processor | Accelerator, model_spec: ModelSpec, budget: Budget
) -> MachineSurvey:
    """What surveys the machine: how fast experts are moved and run."""
    limit_bytes, dtype, store = budget.budget_bytes // 2, model_spec.dtype, opened.store
    if not isinstance(device, Processor):
        trial = DeviceTrial(store, device, opened.shape, dtype, limit_bytes, budget.graphs)
        return MachineSurvey(trial, None)
    key, timed = None, layer_bytes(opened, dtype) <= limit_bytes
    # Where a budget has no room for a layer, the survey is of no use to others.
    if timed and store.num_layers * store.num_experts * mean_moved_bytes(store) >= LEAST_BYTES:
        key = (
            f"{opened.checkpoint.fingerprint()} in {dtype} by {torch.get_num_threads()} threads "
            f"and {budget.readers} readers, speq {__version__}, {store_key(store)}"
        )
    made = ProcessorTrial(opened, dtype, model_spec.draft, budget.readers, limit_bytes)
    return MachineSurvey(made, key)


def dense_trial(opened: Opened, budget: Budget) -> Callable[[], DenseTrial] | None:
    """What times one of a model's own matrices; None on a GPU."""
    if not budget.on_cpu:
        return None
    names = opened.family.names
    return partial(DenseTrial.of, opened.checkpoint, names.is_expert, budget.budget_bytes // 2)
