"""Experts published in INT4: every code under every zero point and scales of all kinds is the
format's word, and products are those of plain words, on every instruction set and in the CUDA
kernels.
"""

from functools import cache

import numpy as np
import pytest
import torch

from speq.kernels import reference_scaled, scaled_ops
from speq.kernels.scaled_layout import Int4GroupsLayout
from speq.kernels.scaled_words import int4_codes, int4_words, part_of
from tests.helpers.coded_records import SEED, CodedRecord, check_products, empty
from tests.helpers.pairwise import covering
from tests.reference import packed_int4

EXPERTS = 5
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


def record_of(shape: Shape, seed: int, any_scale: bool = False) -> CodedRecord:
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
            scales = torch.where(torch.from_numpy(rng.random(scales.shape) < 0.7), edges, scales)
        zeros = rng.integers(16, size=scales.shape) if has_zeros else None
        parts = [(layout.codes[at], packed_int4.packed(codes)), (layout.scales[at], scales)]
        if zeros is not None:
            parts.append((layout.others[at], packed_int4.packed(zeros.T).T.copy()))
        for section, part in parts:
            flat = torch.as_tensor(part).contiguous().flatten().view(torch.uint8)
            part_of(record, section).copy_(flat)
        with np.errstate(all="ignore"):
            words.append(packed_int4.words(codes, scales.float().numpy(), zeros))
    return CodedRecord(record, tuple(words))


@pytest.mark.parametrize("any_scale", [False, True], ids=["usual scales", "any scale"])
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_those_of_the_format(device: torch.device, shape: Shape, any_scale: bool) -> None:
    record, found = record_of(shape, SEED, any_scale), empty(*shape[:2], device)
    scaled_ops.decode("int4", record.record.to(device), shape[2:], *found)
    record.check(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_words_of_the_reference(shape: Shape) -> None:
    record, found = record_of(shape, SEED, any_scale=True), empty(*shape[:2])
    reference_scaled.decode_int4_out(record.record, *shape[2:], *found)
    record.check(found)


@cache
def records_of(shape: Shape) -> list[CodedRecord]:
    return [record_of(shape, seed) for seed in range(EXPERTS)]


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "gap"), covering(SHAPES, DTYPES, (1, 2, 3, 9, 40), (64, 4))
)
def test_products_are_those_of_plain_words(
    device: torch.device, shape: Shape, dtype: torch.dtype, rows: int, gap: int
) -> None:
    """gap: slots that keep vectors aligned, and slots that do not."""
    check_products(device, "int4", shape[2:], records_of(shape), dtype, rows, gap)


def test_float64_runs_the_reference() -> None:
    given = SHAPES[1][2:], records_of(SHAPES[1]), torch.float64
    check_products(torch.device("cpu"), "int4", *given, rows=2, gap=0)


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
    record, found = torch.zeros(1 << 16, dtype=torch.uint8), empty(64, 96)
    with pytest.raises(RuntimeError, match=r"multiples? of"):
        torch.ops.speq.decode_int4_out(record, group, False, False, *found)


def test_records_that_are_too_short() -> None:
    shape = SHAPES[0]
    record, found = record_of(shape, SEED).record, empty(*shape[:2])
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("int4", record[:-1], shape[2:], *found)
    with pytest.raises(ValueError, match=r"^record has \d+ bytes to a record"):
        scaled_ops.decode("int4", record, (shape[2], True, False), *found)
    with pytest.raises(RuntimeError, match="at least"):
        torch.ops.speq.decode_int4_out(record[:-1].clone(), *shape[2:], *found)
