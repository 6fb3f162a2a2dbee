"""Experts published as codes with scales: every code under every scale is the published word, and
products are those of plain words.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from speq.kernels import ops, reference_scaled, scaled_ops
from speq.kernels.scaled_layout import Fp8Layout, Mxfp4Layout, ScaledLayout
from speq.kernels.scaled_words import fp8_codes, fp8_words, mxfp4_codes, mxfp4_words, part_of
from tests.helpers.backends import CUDA_BACKENDS, Backend, backend_named
from tests.helpers.coded_records import random_ids
from tests.helpers.expert_problems import SILU
from tests.helpers.fp8_files import words_of
from tests.helpers.pairwise import covering
from tests.helpers.words import same_words

SEED = 11
EXPERTS = 5
# Rows and columns of FP8 that share a scale; 0: all of them.
BLOCKS = {
    "fp8": (128, 128),
    "fp8 rows": (1, 0),
    "fp8 matrix": (0, 0),
    "fp8 strips": (1, 128),
    "fp8 blocks of 64": (64, 64),
}
FORMATS = [*BLOCKS, "mxfp4"]


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


def form_of(format: str) -> str:
    return "fp8" if format in BLOCKS else format


def layout_of(format: str, hidden: int, width: int) -> ScaledLayout:
    if format == "mxfp4":
        return Mxfp4Layout(hidden, width)
    return Fp8Layout(hidden, width, *BLOCKS[format])


def decode(format: str, record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    scaled_ops.decode(form_of(format), record, BLOCKS.get(format, ()), gate_up_proj, down_proj)


def reference(format: str, record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    decode = getattr(reference_scaled, f"decode_{form_of(format)}_out")
    decode(record, *BLOCKS.get(format, ()), gate_up_proj, down_proj)


def run(format: str, *given: Any) -> None:
    """given: rows, ids, table, slots, width, activation, out"""
    scaled_ops.moe_grouped(form_of(format), *given[:5], BLOCKS.get(format, ()), *given[5:])


def random_bytes(*shape: int, seed: int = SEED) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator).byte()


def record_of(layout: ScaledLayout, codes: list[Tensor], scales: list[Tensor]) -> Tensor:
    """A record whose padding is of no meaning."""
    record = torch.full((layout.nbytes,), 0x7F, dtype=torch.uint8)
    for sections, parts in ((layout.codes, codes), (layout.scales, scales)):
        for section, part in zip(sections, parts, strict=True):
            part_of(record, section).copy_(part.contiguous().view(torch.uint8).flatten())
    return record


def decoded(
    format: str, record: Tensor, hidden: int, width: int, device: torch.device | None = None
) -> list[Tensor]:
    """Words by the reference, or by kernels on a device."""
    shapes = (2 * width, hidden), (hidden, width)
    words = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    if device is None:
        reference(format, record, *words)
    else:
        decode(format, record.to(device), *words)
    return [each.cpu() for each in words]


# The least and the largest of all kinds of float32, those at which a word of FP8 becomes subnormal
# or infinite, and some without a meaning.
SCALES = [
    *(0.0, -0.0, 1.0, -1.0, 0.1, -0.0123, 1 / 3, 3e38, 1e-45, 1e-40, 1.1754944e-38, 7e-39),
    *(sign * 2.0**exponent for exponent in (-126, -120, -118, -101, -100, -99) for sign in (1, -1)),
    *(2.0**exponent * 1.999 for exponent in (99, 100, 101, 117, 118, 119, 120, 127)),
    *(float("inf"), float("-inf"), float("nan")),
]


def fp8_scales() -> list[float]:
    generator = torch.Generator().manual_seed(SEED)
    usual = torch.rand(64, generator=generator) * 1e-3
    count = 256 - len(SCALES) - len(usual)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).int()
    return [*SCALES, *usual.tolist(), *bits.view(torch.float32).tolist()]


def test_every_code_of_fp8_under_scales_of_all_kinds(device: torch.device) -> None:
    """Blocks of 256 scales, each with all codes: gate and up have 128 blocks each."""
    hidden, width = 1024, 2048
    layout = Fp8Layout(hidden, width)
    every = torch.arange(256).repeat(128 * 128 // 256).byte().view(128, 128)
    codes = every.repeat(width // 128, hidden // 128)
    scales = torch.tensor(fp8_scales(), dtype=torch.float32)
    gate_scales, up_scales = scales.view(2, width // 128, hidden // 128)
    down_codes, down_scales = every.repeat(hidden // 128, width // 128), gate_scales.mT
    record = record_of(
        layout, [codes, codes, down_codes], [gate_scales, up_scales, down_scales.contiguous()]
    )
    with np.errstate(all="ignore"):
        gate, up, down = (
            words_of(each.numpy(), factors.numpy())
            for each, factors in (
                (codes, gate_scales),
                (codes, up_scales),
                (down_codes, down_scales),
            )
        )
    found = decoded("fp8", record, hidden, width, device)
    assert same_words(found[0], torch.cat([gate, up]))
    assert same_words(found[1], down)


def test_words_of_fp8_are_those_of_transformers() -> None:
    codes = random_bytes(256, 384).view(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(SEED)) * 1e-3
    for stored in (scales, scales.bfloat16()):
        theirs = Fp8Dequantize(None)._dequantize_one(codes, stored, torch.bfloat16)
        assert same_words(fp8_words(codes, stored), theirs)


def test_every_code_of_mxfp4_under_every_scale(device: torch.device) -> None:
    """transformers' own words, of experts as gpt_oss has them."""
    hidden, width = 256, 256
    blocks, exponents = hidden // 32, torch.arange(256)
    every = torch.arange(256).byte().repeat_interleave(1)
    # Each row of gate_up has blocks of sixteen bytes out of all 256, under one scale.
    codes = every.repeat(2 * width * hidden // 2 // 256).view(2 * width, blocks, 16)
    scales = exponents.repeat_interleave(2).byte().unsqueeze(1).expand(-1, blocks).contiguous()
    down_codes = random_bytes(hidden, width // 32, 16)
    down_scales = random_bytes(hidden, width // 32, seed=2)
    gate_up, down = (
        convert_moe_packed_tensors(each.unsqueeze(0), factors.unsqueeze(0))[0].mT.contiguous()
        for each, factors in ((codes, scales), (down_codes, down_scales))
    )
    record = record_of(Mxfp4Layout(hidden, width), [codes, down_codes], [scales, down_scales])
    found = decoded("mxfp4", record, hidden, width, device)
    assert same_words(found[0], torch.cat([gate_up[0::2], gate_up[1::2]]))
    assert same_words(found[1], down)
    assert same_words(mxfp4_words(codes.flatten(1), scales), gate_up)


def random_record(format: str, hidden: int, width: int, seed: int, times: float = 1.0) -> Tensor:
    """Of weights such as trained ones, under scales that are no powers of 2."""
    layout = layout_of(format, hidden, width)
    fp8 = format in BLOCKS
    generator = torch.Generator().manual_seed(seed)
    codes, scales = [], []
    for rows, columns in layout.matrices:
        matrix = torch.randn(rows, columns, generator=generator).mul(0.1).bfloat16()
        found = fp8_codes(matrix, *BLOCKS[format]) if fp8 else mxfp4_codes(matrix)
        factor = times * (1 + torch.rand(found[1].shape, generator=generator) / 2)
        if fp8:  # subnormal codes and zeros of either sign, which trained weights rarely have
            flat = found[0].view(-1)
            flat = flat[len(flat) // 2 :]
            flat[::67], flat[5::131], flat[7::133] = 3, 0x80, 0
        codes.append(found[0])
        scales.append(found[1] * factor if fp8 else found[1])
    return record_of(layout, codes, scales)


@dataclass(frozen=True)
class Experts:
    """A few experts as words and as records, in the same slots."""

    width: int
    order: Tensor
    gate_up: Tensor
    down: Tensor
    records: Tensor

    @classmethod
    def of(
        cls, format: str, hidden: int, width: int, times: float = 1.0, gap: int = 64
    ) -> "Experts":
        """gap: bytes behind a record."""
        order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(SEED))
        records = [random_record(format, hidden, width, seed, times) for seed in range(EXPERTS)]
        slots = torch.full((EXPERTS, len(records[0]) + gap), 0xA5, dtype=torch.uint8)
        words: list[Any] = [None] * EXPERTS
        for expert, slot in enumerate(order.tolist()):
            slots[slot, : len(records[expert])] = records[expert]
            words[slot] = decoded(format, records[expert], hidden, width)
        return cls(
            width,
            order,
            torch.stack([gate_up for gate_up, _ in words]),
            torch.stack([down for _, down in words]),
            slots,
        )

    def run(
        self, format: str, hidden_states: Tensor, topk_ids: Tensor, device: torch.device
    ) -> Tensor:
        shape, dtype = (*topk_ids.shape, hidden_states.shape[1]), hidden_states.dtype
        out = torch.zeros(shape, dtype=dtype, device=device)
        rows = [each.to(device) for each in (hidden_states, topk_ids, self.order)]
        if format == "words":
            ops.moe_grouped(*rows, self.gate_up.to(device), self.down.to(device), SILU, out)
        else:
            run(format, *rows, self.records.to(device), self.width, SILU, out)
        return out


experts_of = cache(Experts.of)
# Hidden size and expert width: blocks, parts of blocks, rows that are no whole quads, more than the
# 256 columns of a step of a GPU.
SHAPES = {
    "fp8 rows": ((64, 64), (40, 24), (130, 70), (66, 33), (8, 6), (192, 320), (3, 5)),
    "fp8 matrix": ((64, 64), (130, 70), (66, 33), (8, 6), (256, 192), (320, 160)),
    "fp8 strips": ((256, 192), (130, 70), (320, 160)),
    "fp8": ((64, 64), (40, 24), (130, 70), (256, 64), (66, 33), (8, 6), (320, 160), (192, 320)),
    "mxfp4": ((64, 64), (32, 96), (256, 64), (160, 32), (320, 160)),
}
ALL_SHAPES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("any_scale", [False, True], ids=["usual scales", "any scale"])
@pytest.mark.parametrize(("format", "shape"), ALL_SHAPES)
def test_words_of_records_of_all_shapes(
    device: torch.device, format: str, shape: tuple[int, int], any_scale: bool
) -> None:
    record = random_record(format, *shape, seed=SEED)
    if any_scale:
        record = random_bytes(len(record))
    found, wanted = (decoded(format, record, *shape, on) for on in (device, None))
    for ours, exact in zip(found, wanted, strict=True):
        assert same_words(ours, exact)


# Few rows of an expert pass over words as they are rebuilt, many over rows rebuilt before.
ROWS = (1, 3, 8, 40)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("each", "dtype", "rows", "gap"), covering(ALL_SHAPES, DTYPES, ROWS, (64, 4))
)
def test_products_are_those_of_plain_words(
    device: torch.device, each: tuple[str, tuple[int, int]], dtype: torch.dtype, rows: int, gap: int
) -> None:
    """gap: slots that keep vectors aligned, and slots that do not."""
    format, (hidden, width) = each
    experts = experts_of(format, hidden, width, gap=gap)
    generator = torch.Generator().manual_seed(SEED)
    hidden_states = torch.randn(rows, hidden, generator=generator).to(dtype)
    topk_ids = random_ids(rows, EXPERTS)
    found = experts.run(format, hidden_states, topk_ids, device)
    assert torch.equal(found, experts.run("words", hidden_states, topk_ids, device))
    assert bool(found.isfinite().all()) and bool(found.any(2).all())
    # A row does not depend on others of the call.
    alone = experts.run(format, hidden_states[-1:], topk_ids[-1:], device)
    assert torch.equal(found[-1:], alone)


@pytest.mark.parametrize("times", [2.0**-104, 2.0**101])
@pytest.mark.parametrize("format", list(BLOCKS))
def test_products_under_scales_far_from_one(
    device: torch.device, format: str, times: float
) -> None:
    """Where words of an octave are not those of another, shifted."""
    experts = experts_of(format, 256, 192, times)
    hidden_states = torch.randn(2, 256, generator=torch.Generator().manual_seed(SEED)) / times
    found = experts.run(format, hidden_states, random_ids(2, EXPERTS), device)
    assert torch.equal(found, experts.run("words", hidden_states, random_ids(2, EXPERTS), device))
    assert bool(found.isfinite().all()) and bool(found.any(2).all())


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_float64_and_experts_in_no_slot(format: str) -> None:
    """float64 runs through the reference; rows whose expert is in no slot are left as they are."""
    experts = experts_of(format, 64, 64)
    hidden_states = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).double()
    topk_ids = random_ids(4, EXPERTS)
    absent = int(topk_ids[0, 0])
    table = experts.order.clone()
    table[absent] = -1
    out = torch.full((4, 3, 64), 7.0, dtype=torch.float64)
    run(format, hidden_states, topk_ids, table, experts.records, 64, SILU, out)
    wanted = torch.full_like(out, 7.0)
    ops.moe_grouped(hidden_states, topk_ids, table, experts.gate_up, experts.down, SILU, wanted)
    assert torch.equal(out, wanted)
    assert bool((out[topk_ids == absent] == 7.0).all())
    assert not bool((out[topk_ids != absent] == 7.0).any())


@pytest.mark.parametrize(
    ("codes_of", "words"), [(fp8_codes, fp8_words), (mxfp4_codes, mxfp4_words)]
)
def test_words_of_codes_have_those_codes(
    codes_of: Callable[[Tensor], tuple[Tensor, Tensor]], words: Callable[..., Tensor]
) -> None:
    """Rounded once, a matrix is not rounded again; and it is near what it was."""
    matrix = torch.randn(200, 160, generator=torch.Generator().manual_seed(5)).bfloat16()
    matrix[:, :32] = 0
    once = words(*codes_of(matrix))
    assert torch.equal(words(*codes_of(once)).view(torch.int16), once.view(torch.int16))
    largest = {fp8_codes: 1 / 16, mxfp4_codes: 1 / 4}[codes_of]
    error = (once.float() - matrix.float()).abs()
    assert float(error.max()) <= largest * float(matrix.float().abs().max())
    assert bool((once[:, :32] == 0).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate_up_proj", torch.zeros(128, 64), "float32; it must be torch.bfloat16"),
        ("gate_up_proj", torch.zeros(130, 64).bfloat16(), r"must be \[128, 64\]"),
        ("record", torch.zeros(64).byte(), "has 64 bytes to a record"),
        ("record", torch.zeros(64), "float32; it must be torch.uint8"),
    ],
)
def test_errors_name_the_argument(format: str, name: str, value: Tensor, message: str) -> None:
    arguments = {
        "record": random_record(format, 64, 64, 1),
        "gate_up_proj": torch.zeros(128, 64).bfloat16(),
        "down_proj": torch.zeros(64, 64).bfloat16(),
    }
    decode(format, **arguments)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        decode(format, **(arguments | {name: value}))


@pytest.mark.parametrize("format", FORMATS)
def test_ids_and_slots_that_do_not_exist(format: str) -> None:
    experts = experts_of(format, 64, 64)
    hidden_states, out = torch.zeros(1, 64), torch.zeros(1, 1, 64)

    def routed(topk_ids: Tensor, table: Tensor) -> None:
        run(format, hidden_states, topk_ids, table, experts.records, 64, SILU, out)

    with pytest.raises((IndexError, RuntimeError), match="topk_ids holds 9"):
        routed(torch.tensor([[9]]), experts.order)
    with pytest.raises(
        (IndexError, RuntimeError), match=r"slot_table holds \d+; there are 5 slots"
    ):
        routed(torch.tensor([[0]]), experts.order + EXPERTS)


def test_widths_of_mxfp4_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match="experts are 64 by 40; of MXFP4 both are multiples of 32"):
        Mxfp4Layout(64, 40)


@pytest.mark.parametrize("blocks", [(2, 0), (-4, 0), (128, 32), (1, -64)])
def test_blocks_of_fp8_that_kernels_do_not_know(blocks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"blocks of FP8 are {blocks[0]} by {blocks[1]}, and"):
        Fp8Layout(64, 64, *blocks)


@pytest.mark.parametrize("format", FORMATS)
def test_cuda_kernels_refuse_what_is_too_short_or_not_aligned(
    backend: Backend, format: str
) -> None:
    """Called around the checks of the wrappers."""
    record = random_record(format, 64, 64, SEED).to(backend.device)
    words = [each.to(backend.device) for each in decoded(format, record.cpu(), 64, 64)]
    given = *BLOCKS.get(format, ()), *words
    op = getattr(getattr(torch.ops, backend.namespace), f"decode_{form_of(format)}_out").default
    with pytest.raises(RuntimeError, match="records must have at least"):
        op(record[:-1].contiguous(), *given)
    shifted = torch.cat([record[:1], record])[1:]
    with pytest.raises(RuntimeError, match="aligned to four"):
        op(shifted, *given)
