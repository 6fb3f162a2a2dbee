"""The smallest budget a model runs in, with and without a draft."""

import re
from pathlib import Path
from typing import Any

import pytest

from speq import SpeqError
from speq.config import RunConfig
from speq.runtime import Runtime, open_model


def two_slot_budget(
    model: Path,
    context: int,
    dtype: str,
    draft_length: int,
    reader_threads: int = 2,
    draft: str = "auto",
) -> int:
    """Bytes that leave exactly two slots, beside a draft if one is to be had."""
    options: dict[str, Any] = {
        "context_length": context,
        "dtype": dtype,
        "reader_threads": reader_threads,
    }
    with pytest.raises(SpeqError) as refused:
        Runtime(open_model(model), RunConfig.of(1, draft_length, **options))
    match = re.search(r"smallest workable budget is (\d+) bytes", str(refused.value))
    assert match is not None
    smallest = int(match[1])
    if not draft_length:
        return smallest
    runtime = Runtime(open_model(model), RunConfig.of("1GiB", draft_length, draft=draft, **options))
    draft_bytes = runtime.plan.items["draft"]
    runtime.close()
    return smallest + draft_bytes
