"""Compact experts: every bit comes back, products are those of plain words, damage stays inside."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.errors import NoRoom, SpeqError
from speq.kernels import compact_ops, library, ops, reference_compact
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.compact_ops import Part
from speq.kernels.ops import Int4Slots, quantize_int4
from tests.helpers.coded_records import random_ids
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering

# Hidden size and expert width: whole blocks, parts of blocks, rows that are no whole quads.
SHAPES = ((64, 64), (40, 24), (130, 70), (256, 64), (66, 66), (8, 6), (160, 96), (256, 128))
GROUPS = (2, 16, 32, 64, 128, None)
SEED = 11
Pair = tuple[Tensor, Tensor]


def normal(rows: int, columns: int, seed: int = SEED) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()


def any_bits(rows: int, columns: int, seed: int = SEED) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


def any_codes(rows: int, columns: int, group: int) -> Pair:
    generator = torch.Generator().manual_seed(SEED)
    codes = torch.randint(256, (rows, columns // 2), generator=generator).byte()
    scales = torch.randint(-(1 << 15), 1 << 15, (rows, columns // group), generator=generator)
    return codes, scales.to(torch.int16).view(torch.float16)


def bits_of(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int16)


def of_reference(encode: Any, layout: CompactLayout, *parts: Tensor) -> Tensor:
    record = torch.zeros(layout.most_bytes, dtype=torch.uint8)
    nbytes = torch.zeros(1, dtype=torch.int64)
    encode(*parts, record, nbytes)
    return record[: int(nbytes)]


def on_every_isa() -> Iterator[str]:
    """The instruction sets of this processor, each in use in turn."""
    best = library.isa()
    try:
        for name in library.supported_isas():
            library.limit_isa(name)
            yield name
    finally:
        library.limit_isa(best)


def check_decodes(decode: Any, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """decode(gate_up_proj, down_proj) fills matrices that are those given, bit for bit."""
    found = torch.empty_like(gate_up_proj), torch.empty_like(down_proj)
    decode(*found)
    assert torch.equal(bits_of(found[0]), bits_of(gate_up_proj))
    assert torch.equal(bits_of(found[1]), bits_of(down_proj))


@pytest.mark.parametrize("make", [normal, any_bits])
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_lossless_gives_every_bit_back(hidden: int, width: int, make: Any) -> None:
    gate_up, down = make(2 * width, hidden), make(hidden, width)
    record = compact_ops.encode(gate_up, down)
    layout = CompactLayout.of_expert(hidden, width, lossless=True)
    wanted = of_reference(reference_compact.encode_lossless_out, layout, gate_up, down)
    assert torch.equal(record, wanted)
    assert layout.fixed_bytes <= len(record) <= layout.most_bytes
    for _ in on_every_isa():
        check_decodes(lambda *out: compact_ops.decode(record, *out), gate_up, down)
    check_decodes(lambda *out: reference_compact.decode_lossless_out(record, *out), gate_up, down)


KINDS = ("rounded", "other codes", "any bits")


@pytest.mark.parametrize(("shape", "group", "kind"), covering(SHAPES, GROUPS, KINDS))
def test_residual_gives_every_bit_back(
    shape: tuple[int, int], group: int | None, kind: str
) -> None:
    hidden, width = shape
    sizes = group or hidden, group or width
    if hidden % sizes[0] or width % sizes[1]:
        sizes = hidden, width
    make = any_bits if kind == "any bits" else normal
    gate_up, down = make(2 * width, hidden), make(hidden, width)
    if kind == "rounded":
        codes = quantize_int4(gate_up, sizes[0]), quantize_int4(down, sizes[1])
    else:
        codes = any_codes(2 * width, hidden, sizes[0]), any_codes(hidden, width, sizes[1])
    record = compact_ops.encode(gate_up, down, *codes)
    layout = CompactLayout.of_expert(hidden, width, lossless=False)
    flat = *codes[0], *codes[1]
    wanted = of_reference(reference_compact.encode_residual_out, layout, gate_up, down, *flat)
    assert torch.equal(record, wanted)
    assert layout.fixed_bytes <= len(record) <= layout.most_bytes
    for _ in on_every_isa():
        check_decodes(lambda *out: compact_ops.decode(record, *out, *codes), gate_up, down)
    check_decodes(
        lambda *out: reference_compact.decode_residual_out(record, *flat, *out), gate_up, down
    )


SCALES = [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x1234, 0x9234, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00]


@pytest.mark.parametrize("scale", [*SCALES, 0x7E01], ids=hex)
def test_every_word_with_every_code(scale: int) -> None:
    """Rows of gate and up: the 65,536 words, 8,192 to a row, with each of the sixteen codes."""
    hidden, width = 8192, 64
    words = torch.arange(1 << 16).view(8, hidden).repeat(16, 1)
    gate_up = torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)
    codes = torch.arange(16).repeat_interleave(8).unsqueeze(1).expand(-1, hidden // 2)
    bits = torch.full((2 * width, 1), scale - (1 << 16 if scale >> 15 else 0), dtype=torch.int16)
    down = torch.zeros(hidden, width, dtype=torch.bfloat16)
    pairs = (
        ((codes | codes << 4).byte(), bits.view(torch.float16)),
        quantize_int4(down, width),
    )
    exact = gate_up.view(torch.bfloat16)
    record = compact_ops.encode(exact, down, *pairs)
    for _ in on_every_isa():
        check_decodes(lambda *out: compact_ops.decode(record, *out, *pairs), exact, down)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_blocks_of_many_zero_codes(share: float) -> None:
    """Some quads have exceptions, and some blocks more zero codes than a vector has lanes."""
    hidden, width = 256, 64
    gate_up, down = normal(2 * width, hidden), normal(hidden, width)
    codes = quantize_int4(gate_up, 64), quantize_int4(down, 64)
    generator = torch.Generator().manual_seed(SEED)
    for qweight, _ in codes:
        qweight[torch.rand(qweight.shape, generator=generator) < share] = 0x88
        qweight[:8] = torch.randint(256, (8, qweight.shape[1]), generator=generator).byte()
    record = compact_ops.encode(gate_up, down, *codes)
    for _ in on_every_isa():
        check_decodes(lambda *out: compact_ops.decode(record, *out, *codes), gate_up, down)


def test_rounded_codes_have_no_exceptions() -> None:
    """No byte more than a byte a weight, three bits a code 0, its escapes and the index."""
    hidden, width = 256, 128
    gate_up, down = normal(2 * width, hidden), normal(hidden, width)
    codes = quantize_int4(gate_up, 128), quantize_int4(down, 128)
    record = compact_ops.encode(gate_up, down, *codes)
    index = record[: 4 * (2 * width // 4 + hidden // 4)].view(torch.int32)
    assert bool((index >= 0).all())
    assert 8.3 < 8 * len(record) / (3 * hidden * width) < 8.9


def slots_of(records: list[Tensor], order: Tensor) -> Tensor:
    """Record e in slot order[e]; every slot ends where the largest record does."""
    slots = torch.full((len(records), max(map(len, records)) + 3 & ~3), 0xA5, dtype=torch.uint8)
    for expert, record in enumerate(records):
        slots[order[expert], : len(record)] = record
    return slots


class Experts:
    """A few experts as plain words, as records and as codes, in the same slots."""

    count = 5

    def __init__(self, hidden: int, width: int, group: int | None, perm: bool = False) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.width = width
        self.order = torch.randperm(self.count, generator=generator)
        exact = [(normal(2 * width, hidden, e), normal(hidden, width, -e)) for e in range(5)]
        codes = [
            (quantize_int4(gate_up, group or hidden), quantize_int4(down, group or width))
            for gate_up, down in exact
        ]
        place = torch.argsort(self.order)
        self.gate_up = torch.stack([gate_up for gate_up, _ in exact])[place]
        self.down = torch.stack([down for _, down in exact])[place]
        self.lossless = slots_of([compact_ops.encode(*matrices) for matrices in exact], self.order)
        self.residual = slots_of(
            [
                compact_ops.encode(*matrices, *pairs)
                for matrices, pairs in zip(exact, codes, strict=True)
            ],
            self.order,
        )
        self.base_slots = torch.randperm(self.count, generator=generator)
        base = [codes[expert] for expert in torch.argsort(self.base_slots).tolist()]
        self.perm = None
        if perm:
            perms = [torch.randperm(hidden, generator=generator) for _ in range(self.count)]
            self.perm = torch.stack(perms).int()
        self.backend = Int4Slots(
            (torch.stack([b[0][0] for b in base]), torch.stack([b[0][1] for b in base])),
            (torch.stack([b[1][0] for b in base]), torch.stack([b[1][1] for b in base])),
            self.perm,
        )

    def run(self, codec: str, hidden_states: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.zeros(*topk_ids.shape, hidden_states.shape[1], dtype=hidden_states.dtype)
        rows = hidden_states, topk_ids, self.order
        if codec == "raw":
            ops.moe_grouped(*rows, self.gate_up, self.down, SILU, out)
        elif codec == "lossless":
            slots = self.lossless
            compact_ops.moe_grouped_lossless(*rows, slots, self.width, SILU, out)
        else:
            slots = self.residual
            compact_ops.moe_grouped_residual(*rows, slots, self.base_slots, self.backend, SILU, out)
        return out


@cache
def experts_of(hidden: int, width: int, group: int | None) -> Experts:
    return Experts(hidden, width, group)


def inputs(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, hidden, generator=generator).to(dtype)


# Few rows of an expert pass over words as they are rebuilt, many over rows rebuilt before, and
# those of a prompt in panels.
ROWS = (1, 3, 8, 40, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Hidden size, expert width, and group size of the codes.
PRODUCTS = (
    (64, 64, None),
    (130, 70, None),
    (40, 24, 8),
    (256, 64, 64),
    (128, 96, 32),
    (128, 192, 64),
)


@pytest.mark.parametrize(
    ("codec", "shape", "dtype", "rows"), covering(("lossless", "residual"), PRODUCTS, DTYPES, ROWS)
)
def test_products_are_those_of_plain_words(
    isa: str, codec: str, shape: tuple[int, int, int | None], dtype: torch.dtype, rows: int
) -> None:
    hidden = shape[0]
    experts = experts_of(*shape)
    hidden_states, topk_ids = inputs(rows, hidden, dtype), random_ids(rows, Experts.count)
    found = experts.run(codec, hidden_states, topk_ids)
    assert torch.equal(found, experts.run("raw", hidden_states, topk_ids))
    assert bool(found.isfinite().all()) and bool(found.any(2).all())
    if rows <= 16:  # where a row does not depend on others of the call
        alone = experts.run(codec, hidden_states[-1:], topk_ids[-1:])
        assert torch.equal(found[-1:], alone)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("escapes", [0, 1, 7, 8, 9, 15, 16])
def test_products_of_weights_without_a_class(isa: str, escapes: int, rows: int) -> None:
    """So many of each sixteen weights of some rows have high bytes that are rare."""
    generator = torch.Generator().manual_seed(SEED)

    def matrix(count: int, columns: int) -> Tensor:
        made = normal(count, columns).reshape(-1, 4, columns // 16, 16)
        places = torch.rand(len(made), columns // 16, 16, generator=generator).argsort(2) < escapes
        rare = torch.randint(2, 26, places.shape, generator=generator)  # moderate, of many sizes
        made[:, 1] = torch.where(places, made[:, 1] * 2.0**-rare, made[:, 1])
        return made.reshape(count, columns)

    gate_up, down = matrix(2 * 64, 128), matrix(128, 64)
    record = compact_ops.encode(gate_up, down)
    given = inputs(rows, 128, torch.float32), torch.zeros(rows, 1).long()
    found, wanted = torch.zeros(2, rows, 1, 128)
    table = torch.zeros(1).long()
    slots = slots_of([record], torch.zeros(1).long())
    compact_ops.moe_grouped_lossless(*given, table, slots, 64, SILU, found)
    ops.moe_grouped(*given, table, gate_up[None], down[None], SILU, wanted)
    assert torch.equal(found, wanted)
    assert bool(found.any(2).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_come_in_the_order_of_the_codes(dtype: torch.dtype) -> None:
    experts = Experts(128, 64, 64, perm=True)
    hidden_states, topk_ids = inputs(4, 128, dtype), random_ids(4, Experts.count)
    found = experts.run("residual", hidden_states, topk_ids)
    assert experts.perm is not None
    for row, ids in enumerate(topk_ids.tolist()):
        for rank, expert in enumerate(ids):
            perm = experts.perm[experts.base_slots[expert]].long()
            x = hidden_states[row, perm].double()
            slot = experts.order[expert]
            gate, up = (experts.gate_up[slot].double() @ x).chunk(2)
            wanted = experts.down[slot].double() @ (torch.nn.functional.silu(gate) * up)
            torch.testing.assert_close(found[row, rank].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", ["lossless", "residual"])
def test_damage_stays_inside_a_record(isa: str, codec: str) -> None:
    """Whatever index, classes and streams say, decoders end, and bytes of their own stay true.

    Under AddressSanitizer this is also where a decoder would be caught reading outside.
    """
    hidden, width = 130, 70
    gate_up, down = any_bits(2 * width, hidden), normal(hidden, width)
    lossless = codec == "lossless"
    codes = any_codes(2 * width, hidden, hidden), any_codes(hidden, width, width)
    codes = () if lossless else codes
    record = compact_ops.encode(gate_up, down, *codes)
    layout = CompactLayout.of_expert(hidden, width, lossless)
    # The last of the fixed sections are the bytes of the weights, three matrices of them.
    sizes = [-(-rows * columns // 64) * 64 for rows, columns in layout.matrices]
    streams = layout.fixed_bytes - 128
    generator = torch.Generator().manual_seed(SEED)
    for turn in range(24):
        damaged = record.clone()
        bytes_of = torch.randint(256, (len(record),), generator=generator).byte()
        hit = torch.rand(len(record), generator=generator) < (1.0, 0.3, 0.01)[turn % 3]
        hit[streams - sum(sizes) : streams] = False
        damaged[hit] = bytes_of[hit]
        if turn % 2:  # cut off as short as a slot may be
            damaged = damaged[: layout.fixed_bytes + turn].clone()
        found = torch.empty_like(gate_up), torch.empty_like(down)
        compact_ops.decode(damaged, *found, *codes)
        for matrix, exact in zip(found, (gate_up, down), strict=True):
            kept = bits_of(matrix).int() & 0xFF
            assert torch.equal(kept, bits_of(exact).int() & 0xFF)
        if lossless:  # products decode in registers, with reads of their own
            for rows in (1, 3):
                given = inputs(rows, hidden, torch.float32), torch.zeros(rows, 1).long()
                made, wanted = torch.zeros(2, rows, 1, hidden)
                table = torch.zeros(1).long()
                slots = slots_of([damaged], table)
                compact_ops.moe_grouped_lossless(*given, table, slots, width, SILU, made)
                words = [matrix[None] for matrix in found]
                ops.moe_grouped(*given, table, *words, SILU, wanted)
                torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


def test_too_small_a_slot_is_refused_untouched() -> None:
    gate_up, down = normal(128, 64), normal(64, 64)
    record = compact_ops.encode(gate_up, down)
    slot = torch.full((len(record) - 1,), 7, dtype=torch.uint8)
    with pytest.raises(SpeqError, match=f"takes {len(record)} bytes .* made for {len(slot)}"):
        compact_ops.encode_into(gate_up, down, slot)
    assert bool((slot == 7).all())
    slot = torch.zeros(len(record), dtype=torch.uint8)
    assert compact_ops.encode_into(gate_up, down, slot) == len(record)
    assert torch.equal(slot, record)


# Ends of what is encoded at a time, with a gate and without one.
SPLITS = (((1, 2, 3), True), ((2, 3), True), ((1, 3), True), ((2, 3), False))


def parts_of(ends: tuple[int, ...], width: int) -> list[tuple[int, int, int]]:
    """First and last matrix of each part, and rows of gate and up that have come with it."""
    firsts = (0, *ends[:-1])
    return [(first, end, min(end, 2) * width) for first, end in zip(firsts, ends, strict=True)]


@pytest.mark.parametrize(
    ("shape", "kind", "split", "codec"), covering(SHAPES, KINDS, SPLITS, ("lossless", "residual"))
)
def test_matrices_make_the_record_of_the_whole_as_they_come(
    shape: tuple[int, int], kind: str, split: tuple[tuple[int, ...], bool], codec: str
) -> None:
    (hidden, width), (ends, gated) = shape, split
    rows = 2 * width if gated else width
    make = any_bits if kind == "any bits" else normal
    exact = make(rows, hidden), make(hidden, width)
    codes: tuple[Pair, ...] = ()
    if codec == "residual" and kind == "rounded":
        codes = tuple(quantize_int4(matrix, matrix.shape[1]) for matrix in exact)
    elif codec == "residual":
        codes = any_codes(rows, hidden, hidden), any_codes(hidden, width, width)
    library_of = {"lossless": "encode_lossless_out", "residual": "encode_residual_out"}
    reference = getattr(reference_compact, library_of[codec])
    layout = CompactLayout.of_expert(hidden, width, codec == "lossless", gated)
    wanted = of_reference(reference, layout, *exact, *(part for pair in codes for part in pair))
    for _ in on_every_isa():
        came = any_bits(rows, hidden, seed=3), any_bits(hidden, width, seed=3)
        room = torch.full((len(wanted) + 64,), 0xA5, dtype=torch.uint8)
        slot, nbytes = room[:-64], 0
        for first, end, above in parts_of(ends, width):
            came[0][: above if gated else rows] = exact[0][: above if gated else rows]
            if end == 3:
                came[1].copy_(exact[1])
            part = Part(first, end, nbytes)
            nbytes = compact_ops.encode_into(*came, slot, *codes, part=part)
        assert nbytes == len(wanted) and torch.equal(slot, wanted)
        assert bool((room[-64:] == 0xA5).all())


@pytest.mark.parametrize("codec", ["lossless", "residual"])
@pytest.mark.parametrize("matrix", [0, 1, 2])
def test_matrices_that_have_no_room_are_not_written(isa: str, matrix: int, codec: str) -> None:
    """Nor those behind them; the last says what all take."""
    exact = any_bits(2 * 70, 130), any_bits(130, 70)
    codes = (any_codes(2 * 70, 130, 130), any_codes(130, 70, 70)) if codec == "residual" else ()
    whole = compact_ops.encode(*exact, *codes)

    def encode(slot: Tensor) -> Iterator[int]:
        nbytes = 0
        for end in (1, 2, 3):
            part = Part(end - 1, end, nbytes)
            nbytes = compact_ops.encode_into(*exact, slot, *codes, part=part)
            yield nbytes

    sizes = [*encode(torch.zeros_like(whole))]
    assert sizes[-1] == len(whole)
    slot = torch.full((sizes[matrix] - 1,), 0xA5, dtype=torch.uint8)
    encoding, written = encode(slot), slot.clone()
    for end, nbytes in zip((1, 2), encoding, strict=False):
        assert nbytes == sizes[end - 1]
        assert torch.equal(slot, written) == (end > matrix)
        written = slot.clone()
    with pytest.raises(NoRoom, match=f"takes {len(whole)} bytes .* made for {len(slot)}"):
        next(encoding)
    assert torch.equal(slot, written)


@pytest.mark.parametrize("part", [(0, 4, 0), (-1, 2, 0), (2, 2, 1 << 20), (1, 2, 64)])
def test_parts_that_are_none_are_refused(part: tuple[int, int, int]) -> None:
    exact = normal(128, 64), normal(64, 64)
    with pytest.raises(RuntimeError, match="must be of 3, and nbytes of a record with those"):
        compact_ops.encode_into(*exact, torch.zeros(1 << 16).byte(), part=Part(*part))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate_up_proj", torch.zeros(128, 64), "float32; it must be torch.bfloat16"),
        ("gate_up_proj", torch.zeros(130, 64).bfloat16(), r"must be \[128, 64\]"),
        ("record", torch.zeros(64).byte(), "has 64 bytes to a record"),
        ("record", torch.zeros(64), "float32; it must be torch.uint8"),
        ("down_proj", torch.zeros(64), "must be"),
    ],
)
def test_errors_name_the_argument(name: str, value: Tensor, message: str) -> None:
    gate_up, down = normal(128, 64), normal(64, 64)
    arguments = {
        "record": compact_ops.encode(gate_up, down),
        "gate_up_proj": gate_up,
        "down_proj": down,
    }
    compact_ops.decode(**arguments)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        compact_ops.decode(**(arguments | {name: value}))
