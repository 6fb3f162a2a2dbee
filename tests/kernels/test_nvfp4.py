"""Experts published in NVFP4: every code under every scale of a block, and of a matrix of all
kinds, is the format's word, and products are those of plain words, on every instruction set and in
the CUDA kernels.
"""

from functools import cache

import numpy as np
import pytest
import torch

from speq.kernels import reference_scaled, scaled_ops
from speq.kernels.scaled_layout import Nvfp4Layout
from speq.kernels.scaled_words import nvfp4_codes, nvfp4_words, part_of
from tests.helpers.coded_records import SEED, CodedRecord, check_products, empty
from tests.helpers.pairwise import covering
from tests.reference import scaled

EXPERTS = 5
# Hidden size, expert width: halves of blocks, rows that are no whole quads, and room for all pairs
# of a code and a scale.
SHAPES = ((64, 64), (32, 96), (256, 160), (96, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of matrices: usual ones as ModelOpt writes them and as compressed-tensors does, the least and the
# largest, and no numbers.
OF_MATRIX = (2.3e-5, 8123.0, 1.0, 1 / 3, 1e-38, 1e-44, 3e38, -0.01, 0.0, float("inf"), float("nan"))


def record_of(
    shape: tuple[int, int], divides: bool, seed: int, of_matrix: tuple[float, ...] = ()
) -> CodedRecord:
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
    return CodedRecord(record, tuple(words))


KINDS = [OF_MATRIX[at : at + 3] for at in range(0, len(OF_MATRIX) - 2, 2)]


@pytest.mark.parametrize("of_matrix", KINDS)
@pytest.mark.parametrize("divides", [False, True])
def test_words_are_those_of_the_format(
    device: torch.device, divides: bool, of_matrix: tuple[float, ...]
) -> None:
    """Matrices of 40,960 codes: each pair of a code and a scale occurs."""
    record, found = record_of(SHAPES[2], divides, SEED, of_matrix), empty(*SHAPES[2], device)
    scaled_ops.decode("nvfp4", record.record.to(device), (divides,), *found)
    record.check(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("divides", [False, True])
def test_words_of_the_reference(shape: tuple[int, int], divides: bool) -> None:
    record, found = record_of(shape, divides, SEED, OF_MATRIX[:3]), empty(*shape)
    reference_scaled.decode_nvfp4_out(record.record, divides, *found)
    record.check(found)


@cache
def records_of(shape: tuple[int, int], divides: bool) -> list[CodedRecord]:
    return [record_of(shape, divides, seed) for seed in range(EXPERTS)]


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
    check_products(device, "nvfp4", (divides,), records_of(shape, divides), dtype, rows, gap)


def test_float64_runs_the_reference() -> None:
    given = (True,), records_of(SHAPES[1], True), torch.float64
    check_products(torch.device("cpu"), "nvfp4", *given, rows=2, gap=0)


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
    record, found = torch.zeros(1 << 16, dtype=torch.uint8), empty(*sizes)
    with pytest.raises(RuntimeError, match="multiples of 32"):
        torch.ops.speq.decode_nvfp4_out(record, False, *found)


def test_records_that_are_too_short() -> None:
    record, found = record_of(SHAPES[0], False, SEED).record, empty(*SHAPES[0])
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("nvfp4", record[:-1], (False,), *found)
    with pytest.raises(RuntimeError, match="at least"):
        torch.ops.speq.decode_nvfp4_out(record[:-1].clone(), False, *found)
