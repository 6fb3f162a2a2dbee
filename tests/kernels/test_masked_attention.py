"""Attention under a mask: every instruction set against numpy in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.kernels import decoder_ops
from tests.helpers.threads import by_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of results of about one: weights are rounded to 16 bits, and so is the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
pytestmark = pytest.mark.usefixtures("isa")


@dataclass(frozen=True)
class Case:
    """rows: the last of `entries` tokens. holes: share of what rows would see that they do not."""

    rows: int
    entries: int
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    window: int = 1 << 40
    holes: float = 0.0
    sinks: bool = False


CASES = [
    Case(1, 1, 1, 1, (1, 1)),
    Case(3, 40, 5, 1, (5, 17)),
    Case(7, 7, 4, 2, (33, 16), sinks=True),
    Case(20, 530, 6, 2, (24, 40), 19),
    Case(65, 1100, 2, 2, (20, 16), 600, sinks=True),
    Case(130, 600, 16, 2, (16, 8)),
    Case(9, 1300, 8, 4, (64, 48), holes=0.3),
    Case(40, 520, 3, 3, (12, 8), 70, 0.9, True),
]


@dataclass
class Problem:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    sinks: Tensor | None

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> "Problem":
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        key_width, value_width = case.widths
        positions = torch.arange(case.entries)
        own = positions[-case.rows :, None]
        mask = (positions <= own) & (positions > own - case.window)
        mask &= (torch.rand(mask.shape, generator=generator) >= case.holes) | (positions == own)
        return cls(
            normal(case.rows, case.heads, key_width).transpose(0, 1),  # as projections make them
            normal(case.kv_heads, case.entries, key_width),
            normal(case.kv_heads, case.entries, value_width + 3)[..., :value_width],
            mask,
            normal(case.heads) if case.sinks else None,
        )

    def run(self, rows: slice = slice(None)) -> Tensor:
        query, mask = self.query[:, rows], self.mask[rows]
        out = query.new_empty(query.shape[1], len(query), self.value.shape[2])
        decoder_ops.masked_attention(query, self.key, self.value, mask, 0.25, self.sinks, out)
        return out

    def by_hand(self) -> Any:
        """[T, heads, V], a row and a head at a time."""
        query, key, value = (each.double().numpy() for each in (self.query, self.key, self.value))
        heads, rows, _ = query.shape
        out = np.zeros((rows, heads, value.shape[2]))
        for head in range(heads):
            of = head * len(key) // heads
            for row in range(rows):
                seen = self.mask[row].numpy()
                weights = np.exp(key[of][seen] @ query[head, row] * 0.25)
                beside = 0.0 if self.sinks is None else np.exp(float(self.sinks[head]))
                out[row, head] = weights @ value[of][seen] / (weights.sum() + beside)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention(case: Case, dtype: torch.dtype) -> None:
    problem = Problem.of(case, dtype)
    np.testing.assert_allclose(
        problem.run().double().numpy(), problem.by_hand(), rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_do_not_depend_on_one_another(case: Case, dtype: torch.dtype) -> None:
    """A prompt has the bits of its chunks, whatever these are."""
    problem = Problem.of(case, dtype)
    whole, cut = problem.run(), case.rows // 3
    assert torch.equal(whole, torch.cat([problem.run(slice(cut)), problem.run(slice(cut, None))]))
    last = case.rows - 1
    assert torch.equal(whole[last:], problem.run(slice(last, None)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_row_does_not_see_does_not_count(dtype: torch.dtype) -> None:
    problem = Problem.of(CASES[5], dtype)
    before = problem.run(slice(50))
    problem.key[:, 520:] = 9
    problem.value[:, 520:] = 9
    assert torch.equal(before, problem.run(slice(50)))
    assert not torch.equal(before, problem.run()[50:100])


def test_it_does_not_depend_on_threads() -> None:
    results = by_threads(lambda: Problem.of(CASES[4], torch.bfloat16).run())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_is_no_number_stays_none() -> None:
    problem = Problem.of(CASES[3], torch.float32)
    problem.query[2, 5, 0] = torch.nan
    attended = problem.run()
    assert attended[5, 2].isnan().all()
    attended[5, 2] = 0
    assert attended.isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    problem = Problem.of(CASES[4], torch.float32)
    problem.query *= 1e4
    attended = problem.run()
    assert attended.isfinite().all() and attended.abs().max() < 6
