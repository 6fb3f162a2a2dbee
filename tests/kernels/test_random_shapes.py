"""Kernels over problems of random sizes, of as many experts as published models have: those of a
GPU, built for the processor, and the processor's own.

Products of plain words are those of the torch version, which has a judge of its own; a row's do not
depend on other rows; and those of compact records are those of the words, bit for bit.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from speq.kernels import reference
from speq.kernels.checks import activation_numbers
from tests.helpers.backends import HOST_NAMESPACE, Backend, load_host_ops
from tests.helpers.expert_problems import Problem

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@pytest.fixture(params=["cpu", "cuda_on_host"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cpu":
        yield Backend("cpu")
        return
    load_host_ops()
    yield Backend("cuda_on_host", namespace=HOST_NAMESPACE)


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
    ops, numbers = getattr(torch.ops, backend.namespace), activation_numbers(given.activation)
    words, every = (given.gate_up, given.down), slice(None)
    found = given.run(ops.moe_grouped_out, words, numbers, every)
    wanted = given.run(reference.moe_grouped_out, words, (given.activation,), every)
    allowed = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)
    row = rng.randrange(len(found))
    alone = given.run(ops.moe_grouped_out, words, numbers, slice(row, row + 1))
    assert torch.equal(alone[0], found[row])
    lossless = given.run(ops.moe_grouped_lossless_out, given.lossless(), numbers, every)
    assert torch.equal(lossless, found)
    if given.hidden.shape[1] % 2 or given.down.shape[2] % 2:
        return
    residual = given.run(ops.moe_grouped_residual_out, given.residual(), numbers, every)
    assert torch.equal(residual, found)
