"""Experts in host memory, and through it where it is short."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq.experts.host_tier import HostTier
from speq.models.opened import open_model


@pytest.mark.parametrize("fits", [True, False])
def test_records_are_the_stores(
    fits: bool, tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_model(tiny("olmoe")).store
    count = store.num_layers * store.num_experts
    needed = count * store.codec.record_bytes
    tier = HostTier(store, host_bytes=needed if fits else needed - 1, pin=False)
    assert tier.resident is fits
    assert ("stay on disk" in caplog.text) is not fits
    expected = torch.empty(store.codec.record_bytes, dtype=torch.uint8)
    for at in (count - 1, 0, count // 2):
        layer, expert = divmod(at, store.num_experts)
        slot = torch.full((store.codec.record_bytes,), 255, dtype=torch.uint8)
        tier.read(layer, expert, slot)
        store.read(layer, expert, expected)
        assert torch.equal(slot, expected)
