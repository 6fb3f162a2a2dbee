"""Experts published in INT4: every code under every zero point and scales of all kinds is the
format's word, and products are those of plain words, on every instruction set and in the CUDA
kernels.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.kernels import ops, reference_scaled, scaled_ops
from speq.kernels.scaled_layout import Int4GroupsLayout
from speq.kernels.scaled_words import int4_codes, int4_words, part_of
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering
from tests.helpers.words import same_words
from tests.reference import packed_int4

SEED, EXPERTS = 11, 5
Shape = tuple[int, int, int, bool, bool]
# Hidden size, expert width, group, zero points, scales in float16: halves of blocks, groups that
# end within a block and groups of many, rows that are no whole quads.
SHAPES: tuple[Shape, ...] = (
    (64, 64, 32, False, False),
    (32, 96, 32, True, True),
    (256, 64, 64, False, True),
    (192, 96, 96, True, False),
    (256, 128, 128, True, True),
    (160, 32, 32, False, False),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# The least and the largest of all kinds of bfloat16 and of float16, and some that are no numbers.
EDGES = (0.0, -0.0, 1.0, -1.0, 1 / 3, 3e38, -3e38, 1e-40, 1.1754944e-38, 9.2e-41)
HALF_EDGES = (65504.0, -65504.0, 6.1e-5, 5.96e-8, -2e-5)
NO_NUMBERS = (float("inf"), float("-inf"), float("nan"))
# NaNs of float16, of all signs and payloads.
HALF_NANS = (0x7FFF, 0x7E00, 0x7C01, -1, -0x03FF)


@dataclass(frozen=True)
class Record:
    """A record of codes of all values, and the words of its matrices, uint16."""

    record: Tensor
    words: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, shape: Shape, seed: int, any_scale: bool = False) -> "Record":
        group, has_zeros, has_halves = shape[2:]
        dtype = torch.float16 if has_halves else torch.bfloat16
        layout = Int4GroupsLayout(*shape)
        rng = np.random.default_rng(seed)
        record = torch.full((layout.nbytes,), 0x7F, dtype=torch.uint8)
        words = []
        for at, (rows, columns) in enumerate(layout.matrices):
            codes = rng.integers(16, size=(rows, columns))
            scales = torch.from_numpy(rng.normal(size=(rows, columns // group)) * 0.01).to(dtype)
            if any_scale:
                kinds = (*EDGES, *NO_NUMBERS, *(HALF_EDGES if has_halves else ()))
                edges = torch.tensor(rng.choice(kinds, scales.shape)).to(dtype)
                if has_halves:
                    edges.view(torch.int16)[0] = torch.tensor(rng.choice(HALF_NANS, edges.shape[1]))
                scales = torch.where(
                    torch.from_numpy(rng.random(scales.shape) < 0.7), edges, scales
                )
            zeros = rng.integers(16, size=scales.shape) if has_zeros else None
            parts = [(layout.codes[at], packed_int4.packed(codes)), (layout.scales[at], scales)]
            if zeros is not None:
                parts.append((layout.others[at], packed_int4.packed(zeros.T).T.copy()))
            for section, part in parts:
                flat = torch.as_tensor(part).contiguous().flatten().view(torch.uint8)
                part_of(record, section).copy_(flat)
            with np.errstate(all="ignore"):
                words.append(packed_int4.words(codes, scales.float().numpy(), zeros))
        return cls(record, tuple(words))

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """gate_up_proj and down_proj."""
        gate, up, down = (torch.from_numpy(each.view(np.int16)) for each in self.words)
        return torch.cat([gate, up]).view(torch.bfloat16), down.view(torch.bfloat16)


def check_decoded(found: list[Tensor], record: Record) -> None:
    gate, up, down = record.words
    assert same_words(found[0], np.concatenate([gate, up]))
    assert same_words(found[1], down)


def empty(shape: Shape, device: str | torch.device = "cpu") -> list[Tensor]:
    hidden, width = shape[:2]
    sizes = (2 * width, hidden), (hidden, width)
    return [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]


@pytest.mark.parametrize("any_scale", [False, True], ids=["usual scales", "any scale"])
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_those_of_the_format(device: torch.device, shape: Shape, any_scale: bool) -> None:
    record = Record.of(shape, SEED, any_scale)
    found = empty(shape, device)
    scaled_ops.decode("int4", record.record.to(device), shape[2:], *found)
    check_decoded([matrix.cpu() for matrix in found], record)


@pytest.mark.parametrize("shape", SHAPES)
def test_words_of_the_reference(shape: Shape) -> None:
    record = Record.of(shape, SEED, any_scale=True)
    found = empty(shape)
    reference_scaled.decode_int4_out(record.record, *shape[2:], *found)
    check_decoded(found, record)


@cache
def records_of(shape: Shape) -> list[Record]:
    return [Record.of(shape, seed) for seed in range(EXPERTS)]


def slots_of(shape: Shape, order: Tensor, gap: int) -> tuple[Tensor, Tensor, Tensor]:
    """Records in slots, and their words in the same places. gap: bytes behind a record"""
    records = records_of(shape)
    slots = torch.full((EXPERTS, len(records[0].record) + gap), 0xA5, dtype=torch.uint8)
    gate_up, down = (matrix.expand(EXPERTS, -1, -1).clone() for matrix in records[0].matrices)
    for record, slot in zip(records, order.tolist(), strict=True):
        slots[slot, : len(record.record)] = record.record
        gate_up[slot], down[slot] = record.matrices
    return slots, gate_up, down


def route(rows: int, top_k: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.rand(rows, EXPERTS, generator=generator).argsort(dim=1)[:, :top_k].contiguous()


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "gap"), covering(SHAPES, DTYPES, (1, 2, 3, 9, 40), (64, 4))
)
def test_products_are_those_of_plain_words(
    device: torch.device, shape: Shape, dtype: torch.dtype, rows: int, gap: int
) -> None:
    """gap: slots that keep vectors aligned, and slots that do not."""
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(EXPERTS, generator=generator)
    slots, *words = (each.to(device) for each in slots_of(shape, order, gap))
    hidden_states = torch.randn(rows, shape[0], generator=generator).to(dtype)
    head = [each.to(device) for each in (hidden_states, route(rows), order)]
    found, wanted = torch.zeros(2, rows, 3, shape[0], dtype=dtype, device=device)
    scaled_ops.moe_grouped("int4", *head, slots, shape[1], shape[2:], SILU, found)
    ops.moe_grouped(*head, *words, SILU, wanted)
    assert torch.equal(found, wanted)
    assert bool(found.isfinite().all()) and bool(found.any(2).all())


def test_float64_runs_the_reference() -> None:
    shape = SHAPES[1]
    order = torch.arange(EXPERTS)
    slots, gate_up, down = slots_of(shape, order, 0)
    hidden_states = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(3)).double()
    found, wanted = (torch.zeros(2, 3, shape[0], dtype=torch.float64) for _ in range(2))
    head = hidden_states, route(2), order
    scaled_ops.moe_grouped("int4", *head, slots, shape[1], shape[2:], SILU, found)
    ops.moe_grouped(*head, gate_up, down, SILU, wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("group", [32, 64])
def test_words_of_codes_have_those_codes(group: int) -> None:
    """Rounded once, a matrix is not rounded again; and it is near what it was."""
    matrix = torch.randn(200, 192, generator=torch.Generator().manual_seed(5)).bfloat16()
    matrix[:, :64] = 0
    once = int4_words(*int4_codes(matrix, group))
    assert torch.equal(int4_words(*int4_codes(once, group)), once)
    error = (once.float() - matrix.float()).abs()
    assert float(error.max()) <= float(matrix.float().abs().max()) / 7
    assert bool((once[:, :64] == 0).all())


@pytest.mark.parametrize("group", [0, -32, 16, 48, 128])
def test_groups_are_whole(group: int) -> None:
    with pytest.raises(ValueError, match=rf"experts are 64 by 96 in groups of {group}; of INT4"):
        Int4GroupsLayout(64, 96, group)
    record, found = torch.zeros(1 << 16, dtype=torch.uint8), empty((64, 96, 32, False, False))
    with pytest.raises(RuntimeError, match=r"multiples? of"):
        torch.ops.speq.decode_int4_out(record, group, False, False, *found)


def test_records_that_are_too_short() -> None:
    shape = SHAPES[0]
    record, found = Record.of(shape, SEED).record, empty(shape)
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("int4", record[:-1], shape[2:], *found)
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("int4", record, (shape[2], True, False), *found)
    with pytest.raises(RuntimeError, match="at least"):
        torch.ops.speq.decode_int4_out(record[:-1].clone(), *shape[2:], *found)
