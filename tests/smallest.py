"""The smallest budget a model runs in, with and without a draft."""

import re
from pathlib import Path

import pytest

from speq import SpeqError
from speq.config import RunConfig
from speq.runtime import Runtime, open_model


def two_slot_budget(model: Path, context: int, dtype: str, draft_length: int) -> int:
    """Bytes that leave exactly two slots, beside a draft if one is to be had."""
    with pytest.raises(SpeqError) as refused:
        Runtime(
            open_model(model),
            RunConfig.of(1, draft_length, context_length=context, dtype=dtype),
        )
    match = re.search(r"smallest workable budget is (\d+) bytes", str(refused.value))
    assert match is not None
    smallest = int(match[1])
    if not draft_length:
        return smallest
    runtime = Runtime(
        open_model(model), RunConfig.of("1GiB", draft_length, context_length=context, dtype=dtype)
    )
    draft_bytes = runtime.plan.items["draft"]
    runtime.close()
    return smallest + draft_bytes
