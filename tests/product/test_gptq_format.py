"""GPTQ's packing against a second one (tests/helpers/gptq_files.py), bit for bit."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.drafts.gptq_format import (
    FORMATS,
    GptqMatrix,
    check_zeros,
    concatenate,
    dequantise,
    float16_scales,
    input_perm_of,
    pack_codes,
    pack_zeros,
    reorder_codes,
    to_int4,
    unpack_codes,
    unpack_zeros,
)
from tests.helpers import gptq_files
from tests.helpers.gptq_files import Packing
from tests.reference.int4 import unpacked

COLUMNS, ROWS = 256, 24


def matrix(packing: Packing, seed: int = 0) -> tuple[GptqMatrix, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    g_idx = gptq_files.groups_of(COLUMNS, packing, rng)
    parts = gptq_files.packed(rng.standard_normal((ROWS, COLUMNS)), g_idx, packing.version)
    return GptqMatrix(*(torch.from_numpy(parts[name]) for name in gptq_files.FIELDS)), parts


def random_digits(*shape: int) -> Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(4))


def test_codes_are_packed_eight_inputs_to_the_word() -> None:
    codes = random_digits(40, 6)
    qweight = pack_codes(codes)
    assert qweight.dtype == torch.int32
    assert qweight.shape == (5, 6)
    for (k, n), code in np.ndenumerate(codes.numpy()):
        assert gptq_files.digit(int(qweight[k // 8, n]), k % 8) == code
    assert torch.equal(unpack_codes(qweight), codes.to(torch.uint8))
    assert unpack_codes(qweight).dtype == torch.uint8


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_are_packed_eight_outputs_to_the_word(version: int) -> None:
    """All sixteen, those among them that borrow from their neighbours."""
    zeros = random_digits(5, 64)
    zeros[0, :16] = torch.arange(16)
    zeros[1] = 0
    qzeros = pack_zeros(zeros, FORMATS[version - 1])
    assert qzeros.dtype == torch.int32
    wanted = gptq_files.packed_zeros(zeros.numpy(), version)
    assert np.array_equal(qzeros.numpy(), wanted)
    unpacked = unpack_zeros(torch.from_numpy(wanted), FORMATS[version - 1])
    assert torch.equal(unpacked, zeros.to(torch.uint8))


@pytest.mark.parametrize(("checkpoint_format", "word"), [("gptq", 0x77), ("gptq_v2", 0x88)])
def test_symmetric_zero_points_as_they_are_seen_in_files(checkpoint_format: str, word: int) -> None:
    qzeros = pack_zeros(torch.full((1, 8), 8), checkpoint_format)
    assert qzeros.view(torch.uint8).tolist() == [[word] * 4]
    check_zeros(qzeros, checkpoint_format)
    other = FORMATS[1 - FORMATS.index(checkpoint_format)]
    found = {"gptq": 7, "gptq_v2": 9}[checkpoint_format]
    with pytest.raises(ValueError, match=f"the zero point {found} where symmetric codes have 8"):
        check_zeros(qzeros, other)


def test_unknown_format_of_zero_points() -> None:
    with pytest.raises(ValueError, match="'marlin' must be one of gptq, gptq_v2"):
        unpack_zeros(torch.zeros(1, 1, dtype=torch.int32), "marlin")


@pytest.mark.parametrize(
    ("version", "desc_act", "group_size"),
    list(product([1, 2], [False, True], [32, 64, 128, -1])),
)
def test_weights_are_the_same_bit_for_bit(version: int, desc_act: bool, group_size: int) -> None:
    packing = Packing(version, desc_act, group_size)
    packed, parts = matrix(packing)
    size = COLUMNS if group_size == -1 else group_size
    ours = to_int4(packed, size)
    assert ours.qweight.shape == (ROWS, COLUMNS // 2)
    assert ours.scales.shape == (ROWS, COLUMNS // size)
    values = torch.from_numpy(unpacked(ours.qweight.numpy(), ours.scales.numpy())).float()
    if desc_act and group_size != -1:
        assert ours.input_perm is not None
        in_order = torch.empty_like(values)
        in_order[:, ours.input_perm] = values
        values = in_order
    else:
        assert ours.input_perm is None
    wanted = gptq_files.dequantised(parts, version)
    some = torch.tensor([3, 0, 17])
    assert np.array_equal(dequantise(packed, some).half().numpy(), wanted[some])
    assert np.array_equal(values.numpy().astype(np.float16), wanted)
    assert np.array_equal(unpack_zeros(packed.qzeros, FORMATS[version - 1]).numpy() == 8,
                          np.ones((COLUMNS // size, ROWS)))  # fmt: skip


def test_without_g_idx_groups_are_of_neighbours() -> None:
    packed, _ = matrix(Packing())
    bare = to_int4(GptqMatrix(packed.qweight, packed.qzeros, packed.scales), 32)
    full = to_int4(packed, 32)
    assert torch.equal(bare.qweight, full.qweight)
    assert bare.input_perm is full.input_perm is None


def test_inputs_are_reordered_before_they_are_packed_in_rows() -> None:
    codes = random_digits(16, 5)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    ours = reorder_codes(torch.from_numpy(gptq_files.packed_inputs(codes.numpy())), order)
    assert ours.shape == (5, 8)
    assert ours.is_contiguous()
    for (n, c), code in np.ndenumerate(codes[order].t().numpy()):
        assert gptq_files.digit(int(ours[n, c // 2]), c % 2) == code


@pytest.mark.parametrize(
    ("g_idx", "group_size"),
    [([0, 0, 0, 1], 2), ([0, 1, 2, 2], 2), ([0, 0, 2, 2], 2), ([-1, 0, 0, 1], 2)],
)
def test_uneven_groups_are_refused(g_idx: list[int], group_size: int) -> None:
    with pytest.raises(ValueError, match="must name each of 2 groups for 2 of the 4 inputs"):
        input_perm_of(torch.tensor(g_idx, dtype=torch.int32), 4, group_size)


def test_inputs_of_a_group_keep_their_order() -> None:
    perm = input_perm_of(torch.tensor([1, 0, 1, 0], dtype=torch.int32), 4, 2)
    assert perm is not None
    assert perm.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_become_float16_where_that_changes_none(dtype: torch.dtype) -> None:
    scales = torch.tensor([[1.5, 2**-10], [0.0, -3.0]], dtype=dtype)
    assert torch.equal(float16_scales(scales), scales.to(torch.float16))
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="holds an infinity or a NaN"):
            float16_scales(torch.tensor([1.0, bad], dtype=dtype))


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e6, torch.bfloat16), (2**-30, torch.bfloat16), (0.1, torch.float32)]
)
def test_scales_that_float16_cannot_hold(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"in {dtype}, which float16, .* cannot hold exactly"):
        float16_scales(torch.tensor([1.0, value], dtype=dtype))


def test_layers_over_the_same_inputs_are_fused() -> None:
    packed, parts = matrix(Packing(desc_act=True))
    other, others = matrix(Packing(desc_act=True), seed=1)
    with pytest.raises(ValueError, match="have different g_idx, and must share one order"):
        concatenate([packed, other])
    with pytest.raises(ValueError, match="have different g_idx"):
        concatenate([packed, GptqMatrix(other.qweight, other.qzeros, other.scales)])
    alike = GptqMatrix(other.qweight, other.qzeros, other.scales, packed.g_idx)
    ours = to_int4(concatenate([packed, alike]), 32)
    assert ours.input_perm is not None
    values = torch.empty(2 * ROWS, COLUMNS)
    values[:, ours.input_perm] = torch.from_numpy(
        unpacked(ours.qweight.numpy(), ours.scales.numpy())
    ).float()
    wanted = [parts, others | {"g_idx": parts["g_idx"]}]
    assert np.array_equal(
        values.numpy().astype(np.float16),
        np.concatenate([gptq_files.dequantised(each, 1) for each in wanted]),
    )
