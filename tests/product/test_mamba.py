"""Mamba-2 layers: what they compute, beside numpy, and configurations that are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)

from speq.errors import UnsupportedError
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.families import FAMILIES
from speq.models.length import Length
from speq.models.mamba import Mamba, mamba_states
from speq.models.recurrent_cache import RecurrentRows
from tests.helpers.tiny_models import COMMON, FAMILY_OPTIONS

FAMILY = "granitemoehybrid"
HEADS, GROUPS, WIDTH, STATE, TAPS = 4, 2, 32, 24, 4


def config_of(**others: Any) -> Any:
    return AutoConfig.for_model(FAMILY, **COMMON | FAMILY_OPTIONS[FAMILY] | others)


@pytest.fixture
def module() -> GraniteMoeHybridMambaLayer:
    torch.manual_seed(5)
    layer = GraniteMoeHybridMambaLayer(config_of(), 0)
    for name, tensor in layer.named_parameters():
        tensor.data.normal_(std=0.1 if "proj" in name else 0.6)
    return layer.eval()


class Caches:
    """What holds the layer's cache, as a model's caches do."""

    def __init__(self) -> None:
        self.length = Length()
        kind = mamba_states(config_of()).kind
        assert kind is not None
        self.layers = [kind.layer(torch.float32, torch.device("cpu"), self.length)]

    def run(self, mamba: Mamba, rows: Tensor, reading: bool = False) -> Tensor:
        """Run rows, all of which stay."""
        self.length.reading = reading
        out = mamba(rows[None], cache_params=self)[0]
        self.length.count += len(rows)
        self.length.settled = self.length.count
        return out


def in_numpy(module: GraniteMoeHybridMambaLayer, rows: Tensor) -> Any:
    """A sequence of these rows in float64, one token after another (arXiv:2405.21060)."""
    weights = {name: each.detach().double().numpy() for name, each in module.named_parameters()}
    projected = rows.double().numpy() @ weights["in_proj.weight"].T
    gate, inputs, steps = np.split(projected, [HEADS * WIDTH, projected.shape[1] - HEADS], axis=1)
    steps = np.log1p(np.exp(steps + weights["dt_bias"]))
    inputs = np.concatenate([np.zeros((TAPS - 1, inputs.shape[1])), inputs])
    state, out = np.zeros((HEADS, WIDTH, STATE)), []
    for at in range(len(rows)):
        taps = weights["conv1d.weight"][:, 0].T
        mixed = (inputs[at : at + TAPS] * taps).sum(0) + weights["conv1d.bias"]
        mixed = mixed / (1 + np.exp(-mixed))
        values = mixed[: HEADS * WIDTH].reshape(HEADS, WIDTH)
        keys, queries = mixed[HEADS * WIDTH :].reshape(2, GROUPS, STATE)
        for head in range(HEADS):
            of = head * GROUPS // HEADS
            decay = np.exp(-np.exp(weights["A_log"][head]) * steps[at, head])
            state[head] = decay * state[head] + steps[at, head] * np.outer(values[head], keys[of])
        made = np.einsum("hvs,hs->hv", state, queries.repeat(HEADS // GROUPS, 0))
        made = (made + weights["D"][:, None] * values).reshape(-1)
        gated = made * gate[at] / (1 + np.exp(-gate[at]))
        by_group = gated.reshape(GROUPS, -1)
        normed = by_group / np.sqrt((by_group**2).mean(1, keepdims=True) + 1e-6)
        out.append(normed.reshape(-1) * weights["norm.weight"])
    return np.stack(out) @ weights["out_proj.weight"].T


@pytest.mark.parametrize("prompt", [0, 3, MAX_LINEAR_ROWS + 7])
@torch.inference_mode()
def test_tokens_are_those_of_the_formula(module: GraniteMoeHybridMambaLayer, prompt: int) -> None:
    rows = torch.randn(prompt + 9, COMMON["hidden_size"])
    mamba, caches = Mamba(module), Caches()
    out = [caches.run(mamba, rows[:prompt], reading=True)] if prompt else []
    out += [caches.run(mamba, part) for part in rows[prompt:].split([4, 1, 4])]
    wanted = in_numpy(module, rows)
    np.testing.assert_allclose(torch.cat(out).numpy(), wanted, rtol=1e-4, atol=2e-5)
    without_cache = mamba(rows[None], cache_params=None)[0]
    np.testing.assert_allclose(without_cache.numpy(), wanted, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(module(rows[None])[0].numpy(), wanted, rtol=1e-4, atol=2e-5)


@torch.inference_mode()
def test_tokens_together_are_bit_for_bit_those_alone(module: GraniteMoeHybridMambaLayer) -> None:
    mamba, made = Mamba(module), list[Tensor]()
    inputs, decays = torch.randn(12, mamba.sizes.channels), -torch.rand(12, HEADS)
    rows = RecurrentRows(inputs, decays, torch.rand(12, HEADS))
    for counts in ([1] * 12, [5, 7]):
        caches, out = Caches(), []
        for part in rows.split(counts):
            out.append(caches.layers[0].run(part, mamba))
            caches.length.count += len(part.inputs)
        made.append(torch.cat(out))
    assert torch.equal(*made)


def test_limits_of_steps_are_refused() -> None:
    check = FAMILIES[FAMILY].check
    check(config_of(), 8, "model")
    with pytest.raises(UnsupportedError, match=r"time_step_limit \[0.001, inf\]"):
        check(config_of(time_step_limit=(0.001, float("inf"))), 8, "model")
