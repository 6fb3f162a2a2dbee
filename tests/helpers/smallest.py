"""The smallest budget a model runs in, with and without a draft."""

import re
from pathlib import Path

import pytest

from speq import SpeqError
from speq.config import RunConfig
from speq.load import load
from speq.models.opened import open_model
from speq.planning import memory
from speq.runtime import Runtime


def two_slot_budget(
    model: Path,
    context: int,
    dtype: str,
    draft_length: int | None,
    reader_threads: int = 2,
    draft: str = "auto",
    codec: str = "raw",
    drafter: str = "auto",
    device: str = "cpu",
    graphs: str = "auto",
    dense: str = "raw",
    draft_nodes: int | None = None,
    max_batch: int = 1,
    head: str = "auto",
    draft_experts: int | float | None = None,
) -> tuple[int, memory.Demand]:
    """Bytes that leave exactly two slots, beside a draft if one is to be had; and the demand."""
    config = RunConfig.of(
        "1GiB",
        draft_length,
        draft=draft,
        context_length=context,
        dtype=dtype,
        reader_threads=reader_threads,
        codec=codec,
        drafter=drafter,
        device=device,
        graphs=graphs,
        dense=dense,
        draft_nodes=draft_nodes,
        max_batch=max_batch,
        head=head,
        draft_experts=draft_experts,
    )
    runtime = Runtime(load(open_model(model), config))
    demand = runtime.demand
    runtime.close()
    with pytest.raises(SpeqError) as refused:
        memory.plan_memory(demand, 1, context)
    match = re.search(r"smallest workable budget is (\d+) bytes", str(refused.value))
    assert match is not None
    return int(match[1]), demand
