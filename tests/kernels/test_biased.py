"""Experts that have biases and a clamped activation, against transformers' own experts of gpt_oss,
and other activations with a limit: on every instruction set, and as CUDA kernels on the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from speq.experts.codec import ExpertShape, Matrices, codec_of
from speq.experts.int4 import Int4Arena, Int4Layout
from speq.experts.random_expert import random_expert
from speq.experts.slots import SlotExperts
from speq.files.alignment import allocate_aligned
from speq.files.published_format import MXFP4, WORDS
from speq.kernels import ops, reference
from speq.kernels.grouping import Grouping
from speq.kernels.ops import CLAMPED, SILU_BEFORE_LIMIT, Activation, ExpertBiases
from tests.helpers.backends import CPU_BACKENDS, backend_named, cuda_kernels_on_host, need_backend
from tests.helpers.coded_records import random_ids

SEED = 13
HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 96, 5, 3
OF_GPT_OSS = Activation(CLAMPED, 7.0)
ON_HOST = "cuda_on_host"
# Rows that fused kernels take, and more than those of a GPU do.
ROWS = (1, 3, 9, 40)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
route = partial(random_ids, experts=EXPERTS, top_k=TOP_K)
# One rounding of the dtype may fall the other way where sums are added up in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CPU = torch.device("cpu")


@pytest.fixture(params=[*CPU_BACKENDS, ON_HOST])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != ON_HOST:
        for each in backend_named(request):
            yield each.name
        return
    need_backend(request, ON_HOST)
    with cuda_kernels_on_host():
        yield ON_HOST


def normal(*shape: int, spread: float = 1.0, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


@dataclass(frozen=True)
class Layer:
    """Experts as a codec has them, and as words."""

    experts: SlotExperts
    words: list[Matrices]

    @classmethod
    def of(cls, codec_name: str) -> "Layer":
        published = MXFP4 if codec_name == MXFP4 else WORDS
        shape = ExpertShape(HIDDEN, WIDTH, torch.bfloat16, published)
        codec = codec_of(codec_name, shape)
        generator = torch.Generator().manual_seed(SEED)
        words = [random_expert(shape, generator) for _ in range(EXPERTS)]
        arena = Int4Arena(Int4Layout(HIDDEN, WIDTH), 1, EXPERTS, CPU)
        slots = allocate_aligned(EXPERTS, codec.slot_bytes)
        for expert, matrices in enumerate(words):
            arena.quantize_into(expert, *matrices)
            codec.encode(matrices, arena.expert(expert), slots[slot_of(expert)])
        return cls(codec.experts(slots, arena), words)


def slot_of(expert: int) -> int:
    return (3 * expert + 1) % EXPERTS


TABLE = torch.tensor([slot_of(expert) for expert in range(EXPERTS)])
layer_of = cache(Layer.of)


def biases_in(dtype: torch.dtype) -> ExpertBiases:
    """Gates and ups reach beyond where the activation ends. They are words of 8 bits."""
    gate_up = normal(EXPERTS, 2 * WIDTH, spread=4.0).bfloat16().to(dtype)
    return ExpertBiases(gate_up, normal(EXPERTS, HIDDEN, seed=2).bfloat16().to(dtype))


def theirs(words: list[Matrices], dtype: torch.dtype) -> GptOssExperts:
    """transformers' experts of the same numbers, whose rows of gate and up take turns."""
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts, biases = GptOssExperts(config).to(dtype), biases_in(dtype)
    for at, (gate_up, down) in enumerate(words):
        experts.gate_up_proj.data[at, :, 0::2] = gate_up[:WIDTH].T
        experts.gate_up_proj.data[at, :, 1::2] = gate_up[WIDTH:].T
        experts.down_proj.data[at] = down.T
    experts.gate_up_proj_bias.data[:, 0::2] = biases.gate_up[:, :WIDTH]
    experts.gate_up_proj_bias.data[:, 1::2] = biases.gate_up[:, WIDTH:]
    experts.down_proj_bias.data.copy_(biases.down)
    return experts


@torch.no_grad()
def each_by_transformers(experts: GptOssExperts, hidden_states: Tensor, ids: Tensor) -> Tensor:
    """[T, K, H]: every expert of a route by itself, with a weight of 1."""
    alone = hidden_states.repeat_interleave(TOP_K, 0)
    made: Tensor = experts(
        alone, ids.view(-1, 1), torch.ones_like(ids.view(-1, 1), dtype=alone.dtype)
    )
    return made.view(*ids.shape, HIDDEN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["raw", "lossless", "residual", "mxfp4"])
def test_products_are_those_of_transformers(backend: str, codec: str, dtype: torch.dtype) -> None:
    layer, biases = layer_of(codec), biases_in(dtype)
    plain = theirs(layer.words, dtype)
    for rows in ROWS:
        hidden_states, ids = normal(rows, HIDDEN, spread=8.0).to(dtype), route(rows)
        wanted = each_by_transformers(plain, hidden_states, ids)
        out = torch.full_like(wanted, float("nan"))
        slots = {expert: slot_of(expert) for expert in range(EXPERTS)}
        grouping = Grouping.of(ids, ids)
        layer.experts.run(0, hidden_states, grouping, slots, TABLE, OF_GPT_OSS, out, biases)
        allowed = TOLERANCE[dtype] * float(wanted.float().abs().max())
        torch.testing.assert_close(out, wanted, rtol=0, atol=allowed)
        # Rounded where transformers rounds: most numbers are the same to the last bit.
        assert dtype == torch.float32 or (out == wanted).float().mean() > 0.5
        # Without biases, or with another activation, it would be something else.
        other = torch.empty_like(out)
        layer.experts.run(0, hidden_states, grouping, slots, TABLE, OF_GPT_OSS, other)
        assert not torch.allclose(other, wanted, rtol=0, atol=3 * allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["raw", "lossless", "residual", "mxfp4"])
@pytest.mark.parametrize("name", ["silu", SILU_BEFORE_LIMIT])
def test_silu_with_a_limit(backend: str, name: str, codec: str, dtype: torch.dtype) -> None:
    """As transformers computes it: deepseek_v4 and glm5_next before silu, step3p7 after it."""
    limit = 1.3  # which 16 bits do not hold
    layer, biases = layer_of(codec), biases_in(dtype)
    for rows in ROWS:
        hidden_states, ids = normal(rows, HIDDEN, spread=8.0).to(dtype), route(rows)
        made = []
        for row, expert in zip(
            hidden_states.repeat_interleave(TOP_K, 0), ids.flatten(), strict=True
        ):
            gate_up, down = (matrix.to(dtype) for matrix in layer.words[expert])
            gate, up = (F.linear(row, gate_up) + biases.gate_up[expert]).chunk(2)
            up = up.clamp(min=-limit, max=limit)
            after = name == SILU_BEFORE_LIMIT
            gate = F.silu(gate).clamp(max=limit) if after else F.silu(gate.clamp(max=limit))
            made.append(F.linear(gate * up, down) + biases.down[expert])
        wanted = torch.stack(made).view(*ids.shape, HIDDEN)
        out = torch.full_like(wanted, float("nan"))
        slots = {expert: slot_of(expert) for expert in range(EXPERTS)}
        act, grouping = Activation(name, limit), Grouping.of(ids, ids)
        layer.experts.run(0, hidden_states, grouping, slots, TABLE, act, out, biases)
        allowed = TOLERANCE[dtype] * float(wanted.float().abs().max())
        torch.testing.assert_close(out, wanted, rtol=0, atol=allowed)
        assert dtype == torch.float32 or (out == wanted).float().mean() > 0.5


def test_float64_runs_through_the_reference() -> None:
    biases = biases_in(torch.float64)
    hidden_states, ids = normal(3, HIDDEN, spread=8.0).double(), route(3)
    slots = {expert: slot_of(expert) for expert in range(EXPERTS)}
    for codec in ("raw", "lossless", "residual", "mxfp4"):
        layer = layer_of(codec)
        wanted = each_by_transformers(theirs(layer.words, torch.float64), hidden_states, ids)
        out, grouping = torch.empty_like(wanted), Grouping.of(ids, ids)
        layer.experts.run(0, hidden_states, grouping, slots, TABLE, OF_GPT_OSS, out, biases)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_experts_are_those_of_the_reference(backend: str, dtype: torch.dtype) -> None:
    arena = Int4Arena(Int4Layout(HIDDEN, WIDTH), 1, EXPERTS, CPU)
    for expert, matrices in enumerate(layer_of("raw").words):
        arena.quantize_into(expert, *matrices)
    bank, base_slots, biases = arena.experts, arena.base_slots[0], biases_in(dtype)
    for rows in (1, 5):
        ids, weights = route(rows), torch.full((rows, TOP_K), 1 / TOP_K)
        hidden_states = normal(rows, HIDDEN, spread=8.0).to(dtype)
        arguments: Any = (hidden_states, ids, weights, base_slots, bank, OF_GPT_OSS)
        wanted = torch.empty_like(hidden_states, dtype=torch.float32)
        reference.moe_int4_out(
            hidden_states, ids, weights, base_slots, *bank.gate_up, *bank.down, None, OF_GPT_OSS,
            wanted, biases.gate_up, biases.down,
        )  # fmt: skip
        for kernel in (ops.moe_int4, ops.moe_int4_unfused):
            found = kernel(*arguments, biases).float()
            allowed = 0.02 * float(wanted.abs().max())
            torch.testing.assert_close(found, wanted, rtol=0, atol=allowed)
            # A value between codes of INT8 may be rounded the other way, and few are.
            close = TOLERANCE[dtype] * float(wanted.abs().max())
            assert ((found - wanted).abs() <= close).float().mean() > 0.8
            without = kernel(*arguments).float()
            assert not torch.allclose(without, wanted, rtol=0, atol=3 * allowed)


def clamped_by_hand(gate: float, up: float) -> float:
    gate, up = min(gate, 7.0), min(max(up, -7.0), 7.0)
    return float((up + 1) * gate / (1 + np.exp(-1.702 * gate)))


def silu_by_hand(gate: float, up: float) -> float:
    gate, up = min(gate, 7.0), min(max(up, -7.0), 7.0)
    return float(up * gate / (1 + np.exp(-gate)))


def limited_by_hand(gate: float, up: float) -> float:
    return float(min(gate / (1 + np.exp(-gate)), 7.0) * min(max(up, -7.0), 7.0))


BY_HAND = {CLAMPED: clamped_by_hand, "silu": silu_by_hand, SILU_BEFORE_LIMIT: limited_by_hand}


# A gate beyond its end is at it, however far; far below, nothing of it is left.
GATES = (-50.0, -7.5, -1.0, 0.0, 0.5, 6.9, 7.0, 7.1, 1e30, float("inf"))
UPS = (float("-inf"), -1e30, -7.1, -7.0, -1.0, 0.0, 3.0, 7.2, float("inf"))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("gate", GATES)
def test_the_activation_by_hand(backend: str, gate: float, name: str) -> None:
    """Out of biases: products with zeros add nothing to them."""
    width = len(UPS)
    gate_up = torch.tensor([[gate] * width + list(UPS)])
    biases = ExpertBiases(gate_up, torch.zeros(1, width))
    zeros, out = torch.zeros(1, 2 * width, width), torch.empty(1, 1, width)
    one = torch.zeros(1, dtype=torch.int64)
    rows, act = torch.zeros(1, width), Activation(name, 7.0)
    ops.moe_grouped(rows, one[None], one, zeros, torch.eye(width)[None], act, out, biases)
    wanted = [BY_HAND[name](gate, up) for up in UPS]
    assert out[0, 0].tolist() == pytest.approx(wanted, rel=2e-6, abs=1e-30)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_no_number_stays_none(backend: str, name: str) -> None:
    nan = float("nan")
    biases = ExpertBiases(torch.tensor([[nan, 1.0, 1.0, nan]]), torch.zeros(1, 2))
    zeros, out = torch.zeros(1, 4, 2), torch.empty(1, 1, 2)
    one = torch.zeros(1, dtype=torch.int64)
    identity, act = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), Activation(name, 7.0)
    ops.moe_grouped(torch.zeros(1, 2), one[None], one, zeros, identity, act, out, biases)
    assert out.isnan().all()


WRONG: list[tuple[Callable[[ExpertBiases], ExpertBiases], str]] = [
    (lambda b: ExpertBiases(b.gate_up[:, 1:], b.down), "gate_up_bias has shape"),
    (lambda b: ExpertBiases(b.gate_up[1:], b.down), "gate_up_bias has shape"),
    (lambda b: ExpertBiases(b.gate_up.double(), b.down), "gate_up_bias is torch.float64"),
    (lambda b: ExpertBiases(b.gate_up, b.down[:, 1:]), "down_bias has shape"),
    (lambda b: ExpertBiases(b.gate_up, b.down.half()), "down_bias is torch.float16"),
    (lambda b: ExpertBiases(b.gate_up, b.down.T.contiguous().T), "down_bias has strides"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("codec", ["raw", "lossless", "residual", "mxfp4"])
def test_errors_name_the_argument(
    codec: str, wrong: Callable[[ExpertBiases], ExpertBiases], message: str
) -> None:
    layer, ids = layer_of(codec), route(2)
    hidden_states, out = normal(2, HIDDEN), torch.empty(2, TOP_K, HIDDEN)
    biases = wrong(biases_in(torch.float32))
    slots = {expert: slot_of(expert) for expert in range(EXPERTS)}
    with pytest.raises(ValueError, match=f"^{message}"):
        layer.experts.run(
            0, hidden_states, Grouping.of(ids, ids), slots, TABLE, OF_GPT_OSS, out, biases
        )


def test_errors_of_ops_called_by_themselves(backend: str) -> None:
    """The kernels guard their memory."""
    op = torch.ops.speq_cuda_on_host if backend == ON_HOST else torch.ops.speq
    hidden_states, ids, out = normal(2, HIDDEN), route(2), torch.empty(2, TOP_K, HIDDEN)
    gate_up = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN)
    down = torch.zeros(EXPERTS, HIDDEN, WIDTH)
    given = hidden_states, ids, TABLE, gate_up, down, 5, 7.0, out
    biases = biases_in(torch.float32)
    op.moe_grouped_out.default(*given, biases.gate_up, biases.down)
    for wrong in (
        (biases.gate_up[1:], biases.down),
        (biases.gate_up, biases.down[:, :-1]),
        (biases.gate_up.half(), biases.down.half()),
    ):
        with pytest.raises(RuntimeError, match="bias"):
            op.moe_grouped_out.default(*given, *wrong)
