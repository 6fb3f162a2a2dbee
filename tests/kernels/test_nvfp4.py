"""Experts published in NVFP4: every code under every scale of a block, and of a matrix of all
kinds, is the format's word, and products are those of plain words, on every instruction set and in
the CUDA kernels.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.kernels import ops, reference_scaled, scaled_ops
from speq.kernels.scaled_layout import Nvfp4Layout
from speq.kernels.scaled_words import nvfp4_codes, nvfp4_words, part_of
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering
from tests.helpers.words import same_words
from tests.reference import scaled

SEED, EXPERTS = 13, 5
# Hidden size, expert width: halves of blocks, rows that are no whole quads, and room for all pairs
# of a code and a scale.
SHAPES = ((64, 64), (32, 96), (256, 160), (96, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of matrices: usual ones as ModelOpt writes them and as compressed-tensors does, the least and the
# largest, and no numbers.
OF_MATRIX = (2.3e-5, 8123.0, 1.0, 1 / 3, 1e-38, 1e-44, 3e38, -0.01, 0.0, float("inf"), float("nan"))


@dataclass(frozen=True)
class Record:
    """A record of codes, and the words of its matrices, uint16."""

    record: Tensor
    words: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, int], divides: bool, seed: int, of_matrix: tuple[float, ...] = ()
    ) -> "Record":
        """of_matrix: of each matrix; scales of blocks are then of all kinds; empty: usual ones"""
        layout, rng = Nvfp4Layout(*shape), np.random.default_rng(seed)
        record = torch.full((layout.nbytes,), 0x7F, dtype=torch.uint8)
        usual = (300.0, 250.5, 411.0) if divides else (1 / 300, 1 / 250.5, 1 / 411)
        words = []
        for sections, given in zip(layout.parts, of_matrix or usual, strict=True):
            codes, scales = (
                rng.integers(256, size=each.shape).astype(np.uint8) for each in sections[:2]
            )
            if of_matrix:  # all codes in turn in two blocks, and these under all scales in turn
                codes.flat = np.arange(codes.size) * 0x11 % 0x100
                scales.flat = np.arange(scales.size) // 2 % 256
            else:
                scales = scales % 64 + 32
            one = np.array([given], np.float32)
            for section, part in zip(sections, (codes, scales, one.view(np.uint8)), strict=True):
                part_of(record, section).copy_(torch.from_numpy(part).flatten())
            with np.errstate(all="ignore"):
                words.append(scaled.nvfp4_words(codes, scales, one[0], divides))
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


def empty(shape: tuple[int, int], device: str | torch.device = "cpu") -> list[Tensor]:
    hidden, width = shape
    sizes = (2 * width, hidden), (hidden, width)
    return [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]


KINDS = [OF_MATRIX[at : at + 3] for at in range(0, len(OF_MATRIX) - 2, 2)]


@pytest.mark.parametrize("of_matrix", KINDS)
@pytest.mark.parametrize("divides", [False, True])
def test_words_are_those_of_the_format(
    device: torch.device, divides: bool, of_matrix: tuple[float, ...]
) -> None:
    """Matrices of 40,960 codes: each pair of a code and a scale occurs."""
    record, found = Record.of(SHAPES[2], divides, SEED, of_matrix), empty(SHAPES[2], device)
    scaled_ops.decode("nvfp4", record.record.to(device), (divides,), *found)
    check_decoded([matrix.cpu() for matrix in found], record)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("divides", [False, True])
def test_words_of_the_reference(shape: tuple[int, int], divides: bool) -> None:
    record, found = Record.of(shape, divides, SEED, OF_MATRIX[:3]), empty(shape)
    reference_scaled.decode_nvfp4_out(record.record, divides, *found)
    check_decoded(found, record)


@cache
def records_of(shape: tuple[int, int], divides: bool) -> list[Record]:
    return [Record.of(shape, divides, seed) for seed in range(EXPERTS)]


def slots_of(
    shape: tuple[int, int], divides: bool, order: Tensor, gap: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Records in slots, and their words in the same places. gap: bytes behind a record"""
    records = records_of(shape, divides)
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
    ("shape", "divides", "dtype", "rows", "gap"),
    covering(SHAPES, (False, True), DTYPES, (1, 2, 3, 9, 40), (64, 4)),
)
def test_products_are_those_of_plain_words(
    device: torch.device,
    shape: tuple[int, int],
    divides: bool,
    dtype: torch.dtype,
    rows: int,
    gap: int,
) -> None:
    """gap: slots that keep vectors aligned, and slots that do not."""
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(EXPERTS, generator=generator)
    slots, *words = (each.to(device) for each in slots_of(shape, divides, order, gap))
    hidden_states = torch.randn(rows, shape[0], generator=generator).to(dtype)
    head = [each.to(device) for each in (hidden_states, route(rows), order)]
    found, wanted = torch.zeros(2, rows, 3, shape[0], dtype=dtype, device=device)
    scaled_ops.moe_grouped("nvfp4", *head, slots, shape[1], (divides,), SILU, found)
    ops.moe_grouped(*head, *words, SILU, wanted)
    assert torch.equal(found, wanted)
    assert bool(found.isfinite().all()) and bool(found.any(2).all())


def test_float64_runs_the_reference() -> None:
    shape, order = SHAPES[1], torch.arange(EXPERTS)
    slots, gate_up, down = slots_of(shape, True, order, 0)
    hidden_states = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(3)).double()
    found, wanted = (torch.zeros(2, 3, shape[0], dtype=torch.float64) for _ in range(2))
    head = hidden_states, route(2), order
    scaled_ops.moe_grouped("nvfp4", *head, slots, shape[1], (True,), SILU, found)
    ops.moe_grouped(*head, gate_up, down, SILU, wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [1.0, 1e-4, 3e4])
def test_words_of_codes_have_those_codes(size: float) -> None:
    """Rounded once, a matrix is not rounded again; and it is near what it was."""
    matrix = size * torch.randn(200, 192, generator=torch.Generator().manual_seed(5))
    matrix[:, :64] = 0
    once = nvfp4_words(*nvfp4_codes(matrix.bfloat16()), divides=False)
    assert torch.equal(nvfp4_words(*nvfp4_codes(once), divides=False), once)
    blocks, rounded = (each.float().unflatten(1, (-1, 16)) for each in (matrix, once))
    assert bool(((blocks - rounded).abs() <= blocks.abs().amax(2, keepdim=True) / 3).all())
    assert bool((once[:, :64] == 0).all())


@pytest.mark.parametrize("sizes", [(64, 48), (16, 64)])
def test_sizes_are_pairs_of_blocks(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"experts are {sizes[0]} by {sizes[1]}; of NVFP4"):
        Nvfp4Layout(*sizes)
    record, found = torch.zeros(1 << 16, dtype=torch.uint8), empty(sizes)
    with pytest.raises(RuntimeError, match="multiples of 32"):
        torch.ops.speq.decode_nvfp4_out(record, False, *found)


def test_records_that_are_too_short() -> None:
    record, found = Record.of(SHAPES[0], False, SEED).record, empty(SHAPES[0])
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("nvfp4", record[:-1], (False,), *found)
    with pytest.raises(RuntimeError, match="at least"):
        torch.ops.speq.decode_nvfp4_out(record[:-1].clone(), False, *found)
