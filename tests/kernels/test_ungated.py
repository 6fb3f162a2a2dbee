"""Experts without a gate, in every codec that has them: records hold two matrices, decode to the
words that were encoded, and run as their definition in double precision says, on every instruction
set and in the CUDA kernels.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.errors import UnsupportedError
from speq.experts.codec import ExpertShape, Matrices, codec_of
from speq.experts.expert_store import check_groups
from speq.experts.int4 import Int4Arena, Int4Layout
from speq.experts.random_expert import random_expert
from speq.files.alignment import allocate_aligned
from speq.files.packing import Int4Groups
from speq.files.published_format import FP8, INT4, MXFP4, NVFP4, WORDS
from speq.kernels import compact_ops, reference_compact
from speq.kernels.checks import activation_numbers
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, activate
from speq.kernels.scaled_layout import Mxfp4Layout
from tests.helpers.backends import CPU_BACKENDS, CUDA_BACKENDS, backend_named, cuda_device
from tests.helpers.paths import ROOT
from tests.reference import experts

EXPERTS, TOP_K, ACTIVATION = 6, 2, Activation("relu2")
# Of fewer columns than a block of codes, with blocks in part, and with rows that are no quads.
SIZES = ((64, 64), (96, 160), (160, 32))
CODECS = {
    "raw": WORDS,
    "lossless": WORDS,
    "residual": WORDS,
    "fp8": FP8,
    "int4": INT4,
    "nvfp4": NVFP4,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(params=[*CPU_BACKENDS, *CUDA_BACKENDS])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param in CPU_BACKENDS:
        for _ in backend_named(request):
            yield torch.device("cpu")
    else:
        yield from cuda_device(request)


def shape_of(sizes: tuple[int, int], codec: str) -> ExpertShape:
    groups = Int4Groups(32, zeros=False) if codec == INT4 else None
    return ExpertShape(*sizes, torch.bfloat16, CODECS[codec], groups, gated=False)


def words_of(shape: ExpertShape) -> list[Matrices]:
    generator = torch.Generator().manual_seed(3)
    return [random_expert(shape, generator) for _ in range(EXPERTS)]


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.int16), wanted.view(torch.int16))


def routed(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])


@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_run_as_defined(codec_name: str, sizes: tuple[int, int], device: torch.device) -> None:
    shape = shape_of(sizes, codec_name)
    codec, words = codec_of(codec_name, shape), words_of(shape)
    assert [matrix.shape for matrix in words[0]] == [(sizes[1], sizes[0]), sizes]
    arena = Int4Arena(Int4Layout(*sizes, gated=False), 1, EXPERTS, device)
    slots = allocate_aligned(EXPERTS, codec.slot_bytes)
    for at, expert in enumerate(words):
        arena.quantize_into(at, *expert)
        codec.encode(expert, arena.expert(at), slots[at])
    held = codec.experts(slots.to(device), arena)
    for at, expert in enumerate(words):
        read = held.plain(0)(at, at)
        assert same_bits(read.gate_up_proj, expert[0])
        assert same_bits(read.down_proj, expert[1])
    table = torch.arange(EXPERTS, device=device)
    for dtype in DTYPES:
        for rows in (1, 5, 20):
            ids = routed(rows)
            hidden = torch.randn(rows, sizes[0], generator=torch.Generator().manual_seed(rows))
            hidden = hidden.to(dtype)
            out = torch.full((rows, TOP_K, sizes[0]), torch.nan, dtype=dtype, device=device)
            grouping = Grouping(ids.to(device), [], {}, None)
            held.run(0, hidden.to(device), grouping, {}, table, ACTIVATION, out)
            wanted = np.stack(
                [
                    [
                        experts.expert(
                            row.double().numpy(),
                            *(matrix.double().numpy() for matrix in words[expert]),
                            experts.relu2,
                        )
                        for expert in of_row.tolist()
                    ]
                    for row, of_row in zip(hidden, ids, strict=True)
                ]
            )
            error = np.abs(out.double().cpu().numpy() - wanted).max() / wanted.std()
            assert error < (5e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_records_without_kernels_are_those_of_kernels(sizes: tuple[int, int]) -> None:
    """So a pack of either is read by the other."""
    for words in words_of(shape_of(sizes, "lossless")):
        record = compact_ops.encode(*words)
        found, nbytes = torch.zeros(len(record), dtype=torch.uint8), torch.zeros(1).long()
        reference_compact.encode_lossless_out(*words, found, nbytes)
        assert nbytes.item() == len(record) and torch.equal(found, record)
        decoded = [torch.empty_like(matrix) for matrix in words]
        reference_compact.decode_lossless_out(record, decoded[0], decoded[1])
        assert all(map(same_bits, decoded, words))


@pytest.mark.parametrize("codec_name", CODECS)
def test_records_hold_two_matrices(codec_name: str) -> None:
    """Two thirds of the bytes of experts with a gate, but for sections' ends."""
    ungated = shape_of((512, 256), codec_name)
    gated = ExpertShape(512, 256, torch.bfloat16, CODECS[codec_name], ungated.groups)
    codecs = [codec_of(codec_name, shape) for shape in (ungated, gated)]
    least, most = (codec.record_range[0] for codec in codecs)
    assert abs(least / most - 2 / 3) < 0.01
    assert ungated.weights == 2 * 512 * 256


def test_mxfp4_must_have_a_gate() -> None:
    """Its rows of gate and up take turns."""
    shape = ExpertShape(64, 64, torch.bfloat16, MXFP4, gated=False)
    with pytest.raises(ValueError, match=r"^experts have no gate; those of MXFP4 must have one$"):
        Mxfp4Layout(64, 64, gated=False)
    with pytest.raises(UnsupportedError, match=r"without a gate in MXFP4.*give the original"):
        check_groups(shape, ROOT)


def test_a_limit_without_a_gate_is_refused() -> None:
    assert activation_numbers(Activation("relu2"))[1] == math.inf
    with pytest.raises(ValueError, match=r"'relu2' has the limit 5\.0; without a gate"):
        activation_numbers(Activation("relu2", 5.0))


def test_float16_that_no_limit_can_clamp_is_left() -> None:
    words = torch.tensor([[1.0, 60000.0, 2.0, -3.0]], dtype=torch.float16)
    assert torch.equal(
        activate(Activation("silu", 1e5), words), activate(Activation("silu"), words)
    )
