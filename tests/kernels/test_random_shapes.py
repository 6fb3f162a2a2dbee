"""Kernels over problems of random sizes, of as many experts as published models have: those of a
GPU, built for the processor, and the processor's own.

Products of plain words are those of the torch version, which has a judge of its own; a row's do not
depend on other rows; and those of compact records are those of the words, bit for bit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels import compact_ops, library, reference
from tests.helpers.backends import HOST_NAMESPACE, Backend, load_host_ops

SIZES = [(64, 32), (96, 48), (160, 72), (70, 38), (288, 33), (33, 34), (256, 100)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
# Positions that one call of a kernel takes.
MOST_POSITIONS = 256


@pytest.fixture(params=["cpu", "cuda_on_host"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cpu":
        yield Backend("cpu")
        return
    load_host_ops()
    yield Backend("cuda_on_host", namespace=HOST_NAMESPACE)


@dataclass
class Problem:
    """Rows and their routes, and the words of the experts that are in slots."""

    hidden: Tensor
    ids: Tensor
    table: Tensor
    gate_up: Tensor
    down: Tensor
    activation: str
    biases: tuple[Tensor, ...]

    @classmethod
    def of(cls, rng: random.Random) -> "Problem":
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        top_k, experts = rng.choice([1, 2, 8, 10, 16, 17, 22]), rng.choice([64, 256, 384, 512])
        rows = rng.randint(1, min(16, MOST_POSITIONS // top_k))
        hidden_size, width = rng.choice(SIZES)
        dtype = rng.choice([*TOLERANCE])
        # Half of the time few experts, so that rows share them.
        among = torch.randperm(experts, generator=generator)
        among = among[: max(top_k, 24)] if rng.random() < 0.5 else among
        orders = [torch.randperm(len(among), generator=generator)[:top_k] for _ in range(rows)]
        ids = torch.stack([among[order] for order in orders])
        used = ids.unique()
        table = torch.full((experts,), -1)
        table[used] = torch.randperm(len(used), generator=generator)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.1

        biases: tuple[Tensor, ...] = ()
        if rng.random() < 0.3:
            biases = (
                normal(experts, 2 * width).to(dtype),
                normal(experts, hidden_size).to(dtype),
            )
        return cls(
            (10 * normal(rows, hidden_size)).to(dtype),
            ids,
            table,
            normal(len(used), 2 * width, hidden_size).bfloat16(),
            normal(len(used), hidden_size, width).bfloat16(),
            rng.choice(sorted(library.ACTIVATION_CODES)),
            biases,
        )

    def run(self, op: Any, weights: tuple[Any, ...], code: Any, rows: slice) -> Tensor:
        hidden, ids = self.hidden[rows].contiguous(), self.ids[rows].contiguous()
        out = torch.full((*ids.shape, hidden.shape[1]), torch.nan, dtype=hidden.dtype)
        op(hidden, ids, self.table, *weights, code, out, *self.biases)
        return out


def slots_of(records: list[Tensor]) -> Tensor:
    size = -(-max(map(len, records)) // 64) * 64
    slots = torch.zeros(len(records), size, dtype=torch.uint8)
    for slot, record in zip(slots, records, strict=True):
        slot[: len(record)] = record
    return slots


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.full if seed > 8 else pytest.mark.wide)
        for seed in range(60)
    ],
)
def test_problems_at_random(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    given = Problem.of(rng)
    ops, code = getattr(torch.ops, backend.namespace), library.ACTIVATION_CODES[given.activation]
    words, every = (given.gate_up, given.down), slice(None)
    found = given.run(ops.moe_grouped_out, words, code, every)
    wanted = given.run(reference.moe_grouped_out, words, given.activation, every)
    allowed = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)
    row = rng.randrange(len(found))
    alone = given.run(ops.moe_grouped_out, words, code, slice(row, row + 1))
    assert torch.equal(alone[0], found[row])
    experts = list(zip(*words, strict=True))
    slots = slots_of([compact_ops.encode_lossless(*expert) for expert in experts])
    width = given.down.shape[2]
    lossless = given.run(ops.moe_grouped_lossless_out, (slots, width), code, every)
    assert torch.equal(lossless, found)
    if given.hidden.shape[1] % 2 or width % 2:
        return
    pairs = [
        tuple(reference.quantize_int4(matrix, matrix.shape[1]) for matrix in expert)
        for expert in experts
    ]
    records = [
        compact_ops.encode_residual(*expert, *pair)
        for expert, pair in zip(experts, pairs, strict=True)
    ]
    codes = [torch.stack([pair[of][part] for pair in pairs]) for of in (0, 1) for part in (0, 1)]
    residual = given.run(
        ops.moe_grouped_residual_out, (slots_of(records), given.table, *codes, None), code, every
    )
    assert torch.equal(residual, found)
