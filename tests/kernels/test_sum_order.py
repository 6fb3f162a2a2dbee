"""The order of sums of exact experts: that of csrc/sum_order.h, on every processor and card.

The judge of the order has Python's loops and the C library's `fmaf`. The kernels of each
instruction set, and those of cards built for the processor, then agree bit for bit.
"""

import ctypes
import ctypes.util
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.kernels import library
from speq.kernels.checks import activation_numbers
from speq.kernels.ops import Activation
from tests.helpers.backends import HOST_NAMESPACE, ISAS, load_host_ops
from tests.helpers.expert_problems import SIZES, SIZES_OF_CODES, Problem
from tests.helpers.often import often
from tests.kernels.sum_order import Comparisons, limited_to, problem_of

fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float


def dot(words: Tensor, values: Tensor) -> float:
    """A row's product in the order that the header describes."""
    partial = [[0.0] * 8 for _ in range(8)]
    for column, (word, value) in enumerate(zip(words.tolist(), values.tolist(), strict=True)):
        of, at = partial[column % 256 // 32], column % 8
        of[at] = fmaf(word, value, of[at])
    with np.errstate(all="ignore"):
        lists = [np.array(each, dtype=np.float32) for each in partial]
        s = ((lists[0] + lists[1]) + (lists[2] + lists[3])) + (
            (lists[4] + lists[5]) + (lists[6] + lists[7])
        )
        return float(((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])))


def experts_by_hand(hidden: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """moe_grouped of float32 with relu, every expert in the slot of its number."""
    width = down.shape[2]
    out = torch.empty(*ids.shape, hidden.shape[1])
    for row, experts in enumerate(ids.tolist()):
        for place, expert in enumerate(experts):
            sums = torch.tensor([dot(words, hidden[row]) for words in gate_up[expert]])
            inner = sums[:width].relu() * sums[width:]
            out[row, place] = torch.tensor([dot(words, inner) for words in down[expert]])
    return out


@pytest.fixture(params=[*ISAS, "cuda_on_host"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "cuda_on_host":
        load_host_ops()
        yield getattr(torch.ops, HOST_NAMESPACE)
        return
    if request.param not in library.supported_isas():
        pytest.skip(f"this processor has no {request.param}")
    with limited_to(request.param):
        yield torch.ops.speq


@pytest.mark.parametrize("hidden_size, width", [(300, 19), (64, 33), (7, 70), (257, 24)])
def test_sums_are_in_the_order_that_is_written_down(ops: Any, hidden_size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(hidden_size)
    ids = torch.tensor([[1, 0], [0, 2], [1, 2], [0, 1], [0, 2]])
    hidden = torch.randn(len(ids), hidden_size, generator=generator)
    gate_up = torch.randn(3, 2 * width, hidden_size, generator=generator)
    down = torch.randn(3, hidden_size, width, generator=generator)
    out = torch.full((*ids.shape, hidden_size), torch.nan)
    ops.moe_grouped_out(
        hidden, ids, torch.arange(3), gate_up, down, *activation_numbers(Activation("relu")), out
    )
    assert torch.equal(out, experts_by_hand(hidden, ids, gate_up, down))


def test_an_order_of_its_own_shows() -> None:
    """What the tests above could not tell apart would prove nothing."""
    generator = torch.Generator().manual_seed(0)
    words, values = torch.randn(2, 300, generator=generator)
    assert dot(words, values) != float(words.double() @ values.double())
    assert dot(words, values) != float(words @ values)


@pytest.mark.parametrize("seed", often(range(120), quick=3, wide=3))
def test_every_processor_and_card_has_the_same_bits(seed: int) -> None:
    """In each form about six comparisons; `python -m tests.kernels.sum_order` has as many as are
    asked for.
    """
    load_host_ops()
    found = Comparisons()
    found.add(problem_of(seed))
    assert found.of.total() > 0
    assert not found.differing


# Of words, of rows: what a conversion may lose bits of.
CONVERTED = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
]


def small(problem: Problem, words: torch.dtype, rows: torch.dtype) -> Problem:
    """A problem of a few rows with words so small that many have fewer bits in float16."""
    gate_up, down = ((each.float() * 2e-4).to(words) for each in (problem.gate_up, problem.down))
    hidden = (problem.hidden.float() * 400).to(rows)
    return replace(problem, hidden=hidden, gate_up=gate_up, down=down, biases=())


@pytest.mark.parametrize("words, rows", CONVERTED)
@pytest.mark.parametrize("sizes", [SIZES, SIZES_OF_CODES])
def test_words_are_rounded_to_the_dtype_of_rows(
    ops: Any, words: torch.dtype, rows: torch.dtype, sizes: list[tuple[int, int]]
) -> None:
    """As transformers converts a checkpoint that it loads in another dtype."""
    given = small(Problem.of(random.Random(len(sizes)), sizes), words, rows)
    numbers, every = activation_numbers(given.activation), slice(None)
    pair = given.gate_up, given.down
    converted = tuple(each.to(rows) for each in pair)
    assert any(not torch.equal(a.float(), b.float()) for a, b in zip(pair, converted, strict=True))
    wanted = given.run(ops.moe_grouped_out, converted, numbers, every)
    assert torch.equal(given.run(ops.moe_grouped_out, pair, numbers, every), wanted)
    if words != torch.bfloat16:
        return
    for op, weights in given.forms():
        if op in ("moe_grouped_lossless_out", "moe_grouped_residual_out"):
            assert torch.equal(given.run(getattr(ops, op), weights, numbers, every), wanted), op


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_a_card_has_the_same_bits(seed: int) -> None:
    given = Problem.of(random.Random(seed), SIZES if seed % 2 else SIZES_OF_CODES)
    numbers, every, there = activation_numbers(given.activation), slice(None), given.on("cuda")
    for op, weights in given.forms():
        kernel = getattr(torch.ops.speq, op)
        with library.ordered_sums():
            wanted = given.run(kernel, weights, numbers, every)
        moved = tuple(each.cuda() if isinstance(each, Tensor) else each for each in weights)
        assert torch.equal(there.run(kernel, moved, numbers, every).cpu(), wanted), op
