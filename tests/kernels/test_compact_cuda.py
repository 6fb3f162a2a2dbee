"""The CUDA kernels over compact experts, on a GPU or on the host, where `make sanitize` built them.

Their products are to be those of `moe_grouped` over plain words on the same backend, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels import compact_ops, reference, reference_compact
from speq.kernels.checks import activation_numbers
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.ops import Activation
from tests.helpers.backends import CUDA_BACKENDS, Backend, backend_named
from tests.helpers.expert_problems import SILU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS = ["lossless", "residual"]
POISON = float("nan")
EXPERTS = 4
SLOTS = 6
BASE_SLOTS = 5
INDEX_BYTES = 4


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


def same_bits(ours: Tensor, wanted: Tensor) -> bool:
    """Equal with signs of zeros; NaNs, whose bits processors choose, where there are NaNs."""
    assert ours.dtype == wanted.dtype
    words = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    nan = wanted.isnan()
    same = (ours.view(words) == wanted.view(words)) | nan
    return bool((same & (ours.isnan() == nan)).all())


@dataclass(frozen=True)
class Expert:
    """Exact words, and the codes of a draft; in the order of its inputs, which `perm` has."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    def record(self, codec: str) -> Tensor:
        codes = () if codec == "lossless" else (self.gate_up, self.down)
        return compact_ops.encode(self.gate_up_proj, self.down_proj, *codes)

    def decoded(self, backend: Backend, codec: str, record: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, down = torch.zeros_like(self.gate_up_proj), torch.zeros_like(self.down_proj)
        codes = (*self.gate_up, *self.down) if codec == "residual" else ()
        device = backend.device
        on_device = [tensor.to(device) for tensor in (record, *codes, gate_up, down)]
        op = getattr(getattr(torch.ops, backend.namespace), f"decode_{codec}_out").default
        op(*on_device)
        return on_device[-2].cpu(), on_device[-1].cpu()


def moved_codes(
    matrix: Tensor, group_size: int, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Codes rounded to nearest, of which a share is anything."""
    qweight, scales = reference.quantize_int4(matrix, group_size)
    anything = torch.randint(0, 256, qweight.shape, generator=generator).to(torch.uint8)
    moved = torch.rand(qweight.shape, generator=generator) < share
    return torch.where(moved, anything, qweight), scales


def random_expert(
    hidden_size: int, width: int, groups: tuple[int, int], share: float, seed: int
) -> Expert:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(2 * width, hidden_size, generator=generator).mul(0.1).bfloat16()
    down = torch.randn(hidden_size, width, generator=generator).mul(0.1).bfloat16()
    return Expert(
        gate_up,
        down,
        moved_codes(gate_up, groups[0], share, generator),
        moved_codes(down, groups[1], share, generator),
    )


@dataclass(frozen=True)
class Problem:
    """Arguments of moe_grouped over plain words and over records of either codec."""

    hidden_states: Tensor
    topk_ids: Tensor
    slot_table: Tensor
    base_slots: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    records: dict[str, Tensor]
    codes: tuple[Tensor, ...]
    input_perm: Tensor | None = None
    activation: Activation = SILU

    def blank(self) -> Tensor:
        shape = (*self.topk_ids.shape, self.hidden_states.shape[1])
        return torch.full(shape, POISON, dtype=self.hidden_states.dtype)

    def raw(self, backend: Backend) -> Tensor:
        out, words = self.blank(), (self.gate_up_proj, self.down_proj)
        head = (self.hidden_states, self.topk_ids, self.slot_table)
        backend.run("moe_grouped", *head, *words, *activation_numbers(self.activation), out)
        return out

    def by(self, backend: Backend, codec: str, out: Tensor | None = None) -> Tensor:
        out = self.blank() if out is None else out
        head: tuple[Any, ...] = (self.hidden_states, self.topk_ids, self.slot_table)
        head += (self.records[codec],)
        if codec == "lossless":
            head += (self.down_proj.shape[2],)
        else:
            head += (self.base_slots, *self.codes, self.input_perm)
        backend.run(f"moe_grouped_{codec}", *head, *activation_numbers(self.activation), out)
        return out


def in_slots(items: list[Tensor], places: Tensor, count: int) -> Tensor:
    """Items where they belong, of which none need be as large as the largest."""
    room = max(len(item) for item in items) if items[0].dim() == 1 else 0
    shape = (-(-room // 64) * 64,) if room else items[0].shape
    slots = torch.zeros(count, *shape, dtype=items[0].dtype)
    for item, place in zip(items, places.tolist(), strict=True):
        slots[place][: len(item)] = item
    return slots


def problem_of(experts: list[Expert], rows: int, dtype: torch.dtype, seed: int = 3) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    hidden_size = experts[0].down_proj.shape[0]
    table = SLOTS - len(experts) + torch.randperm(len(experts), generator=generator)
    base = torch.randperm(BASE_SLOTS, generator=generator)[: len(experts)]
    ids = [torch.randperm(len(experts), generator=generator)[:2] for _ in range(rows)]
    codes = [[*expert.gate_up, *expert.down] for expert in experts]
    return Problem(
        torch.randn(rows, hidden_size, generator=generator).to(dtype),
        torch.stack(ids),
        table,
        base,
        in_slots([expert.gate_up_proj for expert in experts], table, SLOTS),
        in_slots([expert.down_proj for expert in experts], table, SLOTS),
        {codec: in_slots([e.record(codec) for e in experts], table, SLOTS) for codec in CODECS},
        tuple(in_slots(list(part), base, BASE_SLOTS) for part in zip(*codes, strict=True)),
    )


def problem(
    hidden_size: int = 136,
    width: int = 40,
    groups: tuple[int, int] = (8, 40),
    rows: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """An expert of nearest codes, two with some moved, and one with codes of no meaning."""
    shares = [0.0, 0.03, 0.03, 1.0]
    experts = [
        random_expert(hidden_size, width, groups, share, seed) for seed, share in enumerate(shares)
    ]
    return problem_of(experts, rows, dtype)


# Hidden size, expert width, and the group sizes of both products.
SHAPES = [
    (256, 64, (128, 64)),
    (320, 48, (64, 16)),
    (264, 72, (264, 72)),  # one scale to a row
    (96, 130, (32, 2)),
    (100, 36, (20, 4)),  # no multiple of a vector, groups that end within one
    (6, 2, (2, 2)),
]
# Segments of 32 columns under one scale, which kernels load whole; rows that end with a step of 256
# columns, or within the next, and more of them than are prefetched at a time.
WHOLE_SHAPES = [(256, 32, (128, 32)), (288, 160, (32, 160)), (1056, 64, (1056, 64))]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("hidden_size", "width", "groups"), SHAPES + WHOLE_SHAPES)
def test_decoded_words(
    backend: Backend, codec: str, hidden_size: int, width: int, groups: tuple[int, int]
) -> None:
    """Of nearest codes, of some moved, and of codes of no meaning."""
    for share in (0.0, 0.03, 1.0):
        expert = random_expert(hidden_size, width, groups, share, seed=1)
        gate_up, down = expert.decoded(backend, codec, expert.record(codec))
        assert torch.equal(gate_up.view(torch.int16), expert.gate_up_proj.view(torch.int16))
        assert torch.equal(down.view(torch.int16), expert.down_proj.view(torch.int16))


@pytest.mark.parametrize(("hidden_size", "width"), [(33, 17), (5, 3), (264, 1), (67, 66)])
def test_decoded_lossless_words_of_odd_shapes(
    backend: Backend, hidden_size: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(2 * width, hidden_size, generator=generator).bfloat16()
    down = torch.randn(hidden_size, width, generator=generator).bfloat16()
    nothing = torch.empty(0), torch.empty(0)
    expert = Expert(gate_up, down, nothing, nothing)
    ours = expert.decoded(backend, "lossless", expert.record("lossless"))
    assert torch.equal(ours[0], gate_up)
    assert torch.equal(ours[1], down)


@pytest.mark.parametrize("codec", CODECS)
def test_every_word_under_every_code(backend: Backend, codec: str) -> None:
    """All 65,536 words, in any order, each twice under random codes, and scales of all kinds."""
    generator = torch.Generator().manual_seed(5)
    hidden_size, width = 256, 171 + 1
    count = 3 * hidden_size * width
    places = torch.randperm(count, generator=generator) % 2**16
    words = places.sub(2**15).to(torch.int16).view(torch.bfloat16)
    split = 2 * width * hidden_size
    gate_up = words[:split].view(2 * width, hidden_size)
    down = words[split:].view(hidden_size, width)

    def codes(matrix: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        rows, columns = matrix.shape
        shape = rows, columns // group_size
        scales = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
        qweight = torch.randint(0, 256, (rows, columns // 2), generator=generator)
        return qweight.to(torch.uint8), scales.view(torch.float16)

    expert = Expert(gate_up, down, codes(gate_up, 32), codes(down, 4))
    ours = expert.decoded(backend, codec, expert.record(codec))
    assert torch.equal(ours[0].view(torch.int16), gate_up.view(torch.int16))
    assert torch.equal(ours[1].view(torch.int16), down.view(torch.int16))


# Sixteen rows are slow on the host; `test_row_alone_and_in_company` has as many.
@pytest.mark.parametrize("rows", [1, 2, 7, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("shape", SHAPES[3:] + WHOLE_SHAPES[:2], ids=str)
def test_products_are_those_of_plain_words(
    backend: Backend, shape: tuple[int, int, tuple[int, int]], rows: int
) -> None:
    given = problem(*shape, rows)
    wanted = given.raw(backend)
    assert wanted.isfinite().all()
    for codec in CODECS:
        assert same_bits(given.by(backend, codec), wanted)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        *((dtype, "silu") for dtype in DTYPES),
        (torch.bfloat16, "gelu_pytorch_tanh"),
        pytest.param(torch.float32, "gelu_pytorch_tanh", marks=pytest.mark.full),
        pytest.param(torch.float16, "gelu_pytorch_tanh", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_products_of_every_dtype(backend: Backend, dtype: torch.dtype, activation: str) -> None:
    """Rows longer than what a warp takes at a time; against double precision, too."""
    given = replace(problem(288, 64, (288, 64), 4, dtype), activation=Activation(activation))
    wanted = given.raw(backend)
    for codec in CODECS:
        assert same_bits(given.by(backend, codec), wanted)
    exact = given.blank().double()
    words = (given.gate_up_proj, given.down_proj)
    head = (given.hidden_states.double(), given.topk_ids, given.slot_table)
    reference.moe_grouped_out(*head, *words, given.activation, exact)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert (wanted.double() - exact).abs().max() / exact.std() < tolerance


def test_words_that_float16_lacks(backend: Backend) -> None:
    """Rows of float16 are multiplied by words rounded to it, as transformers would have them."""
    experts = [random_expert(40, 24, (40, 24), 0.03, seed) for seed in range(2)]
    experts[0].gate_up_proj[3, 5] = 1e6
    experts[0].down_proj[7, 20] = 1e-9
    given = problem_of(experts, 3, torch.float16)
    wanted = given.raw(backend)
    assert not wanted.isfinite().all()
    for codec in CODECS:
        assert same_bits(given.by(backend, codec), wanted)


@pytest.mark.parametrize("rows", [1, 5])
def test_permuted_inputs(backend: Backend, rows: int) -> None:
    """Whole numbers, whose sums are exact in any order, against the plain reference."""
    generator = torch.Generator().manual_seed(6)
    hidden_size, width = 96, 40
    experts, matrices, perms = [], [], []
    for _ in range(EXPERTS):
        gate_up = torch.randint(-1, 2, (2 * width, hidden_size), generator=generator).bfloat16()
        down = torch.randint(-1, 2, (hidden_size, width), generator=generator).bfloat16()
        perm = torch.randperm(hidden_size, generator=generator)
        codes = [moved_codes(matrix, 8, 0.1, generator) for matrix in (gate_up[:, perm], down)]
        experts.append(Expert(gate_up[:, perm].contiguous(), down, codes[0], codes[1]))
        matrices.append(gate_up)
        perms.append(perm.int())
    given = problem_of(experts, rows, torch.float32)
    whole = torch.randint(-2, 3, (rows, hidden_size), generator=generator).float()
    given = replace(given, hidden_states=whole, activation=Activation("relu"))
    given = replace(given, input_perm=in_slots_of(perms, given.base_slots))
    wanted = given.blank()
    words = (in_slots(matrices, given.slot_table, SLOTS), given.down_proj)
    head = (whole, given.topk_ids, given.slot_table)
    reference.moe_grouped_out(*head, *words, given.activation, wanted)
    assert torch.equal(given.by(backend, "residual"), wanted)
    assert not torch.equal(replace(given, input_perm=None).by(backend, "residual"), wanted)


def in_slots_of(perms: list[Tensor], base_slots: Tensor) -> Tensor:
    """Orders of inputs in base slots; where there is no expert, of no input at all."""
    slots = torch.full((BASE_SLOTS, len(perms[0])), -1, dtype=torch.int32)
    for perm, place in zip(perms, base_slots.tolist(), strict=True):
        slots[place] = perm
    return slots


@pytest.mark.parametrize("codec", CODECS)
def test_row_alone_and_in_company(backend: Backend, codec: str) -> None:
    given = problem(rows=16)
    together = given.by(backend, codec)
    for rows in ([0], [15], [2, 3], [1, 4, 9, 11, 13]):
        part = replace(
            given, hidden_states=given.hidden_states[rows], topk_ids=given.topk_ids[rows]
        )
        assert same_bits(part.by(backend, codec), together[rows])


@pytest.mark.parametrize("codec", CODECS)
def test_absent_experts_are_left_alone(backend: Backend, codec: str) -> None:
    given = problem(rows=4)
    table = given.slot_table.clone()
    table[1] = -1
    absent = given.topk_ids == 1
    assert absent.any()
    whole = given.by(backend, codec)
    out = torch.full_like(whole, 7)
    replace(given, slot_table=table).by(backend, codec, out)
    assert (out[absent] == 7).all()
    assert torch.equal(out[~absent], whole[~absent])


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_beside_the_output_is_written(backend: Backend, codec: str) -> None:
    """Outputs lie in the middle of a larger tensor; rows of the last quad are not all there."""
    given = problem(70, 22, (14, 2), rows=3)
    around = torch.full((5, 2, 70), -12345.0, dtype=torch.bfloat16)
    poison = around[0].clone()
    given.by(backend, codec, around[1:-1])
    assert torch.equal(around[0], poison)
    assert torch.equal(around[-1], poison)
    assert same_bits(around[1:-1], given.raw(backend))


@pytest.mark.parametrize(
    ("codec", "what"),
    [*((codec, what) for codec in CODECS for what in ("id", "slot")), ("residual", "base slot")],
)
def test_what_does_not_exist_is_no_number(backend: Backend, codec: str, what: str) -> None:
    given = problem(rows=4)
    whole = given.by(backend, codec)
    reached = given.topk_ids == 2
    if what == "id":
        broken = replace(given, topk_ids=given.topk_ids.masked_fill(reached, 2**40))
    elif what == "slot":
        broken = replace(given, slot_table=given.slot_table.index_fill(0, torch.tensor(2), SLOTS))
    else:
        base = given.base_slots.index_fill(0, torch.tensor(2), -1)
        broken = replace(given, base_slots=base)
    out = broken.by(backend, codec)
    assert out[reached].isnan().all()
    assert same_bits(out[~reached], whole[~reached])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["noise", "ones", "streams", "index"])
def test_damaged_records_harm_no_other(backend: Backend, codec: str, kind: str) -> None:
    """Slots end with the memory they lie in, where AddressSanitizer watches it."""
    generator = torch.Generator().manual_seed(7)
    given = problem(100, 36, (20, 4), rows=3)
    whole = given.by(backend, codec)
    layout = CompactLayout.of_expert(100, 36, codec == "lossless")
    slots = given.records[codec].clone()
    damaged = slots[SLOTS - 1]
    noise = torch.randint(0, 256, damaged.shape, generator=generator).to(torch.uint8)
    if kind == "noise":
        damaged.copy_(noise)
    elif kind == "ones":
        damaged.fill_(0xFF)
    elif kind == "streams":
        damaged[layout.fixed_bytes - 64 :] = noise[layout.fixed_bytes - 64 :]
    else:
        head = 64 if codec == "lossless" else 0
        damaged[head : head + 256] = noise[head : head + 256]
    reached = given.topk_ids == int(given.slot_table.argmax())
    assert reached.any()
    out = replace(given, records=given.records | {codec: slots}).by(backend, codec)
    assert same_bits(out[~reached], whole[~reached])
    assert not same_bits(out[reached], whole[reached])


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_quad_harms_no_other(backend: Backend, codec: str) -> None:
    """An entry of the index is where one quad's streams begin, and those of the one before end."""
    expert = random_expert(200, 24, (8, 8), 0.5, seed=8)
    record = expert.record(codec)
    index = 64 if codec == "lossless" else 0
    record[index + INDEX_BYTES * 3 : index + INDEX_BYTES * 4] = torch.tensor([0xFF, 9, 99, 0x7F])
    gate_up, down = expert.decoded(backend, codec, record)
    harmed = (gate_up.view(torch.int16) != expert.gate_up_proj.view(torch.int16)).any(1)
    assert harmed[8:16].any()
    assert not harmed[:8].any()
    assert not harmed[16:].any()
    assert torch.equal(down, expert.down_proj)


@pytest.mark.parametrize("codec", CODECS)
def test_segments_of_many_escapes(backend: Backend, codec: str) -> None:
    """More escapes in a segment than a word of them holds: none, a few, a vector of them, all."""
    generator = torch.Generator().manual_seed(9)
    expert = random_expert(320, 32, (32, 32), 0.03, seed=10)
    for row, count in enumerate([0, 1, 3, 4, 5, 8, 9, 31, 32]):
        # Exponents that no class stands for, and that no window of a code has.
        places = 64 + torch.randperm(32, generator=generator)[:count]
        expert.gate_up_proj[row, places] = 1e30
        expert.down_proj[row, places - 64] = -1e-30
    gate_up, down = expert.decoded(backend, codec, expert.record(codec))
    assert torch.equal(gate_up.view(torch.int16), expert.gate_up_proj.view(torch.int16))
    assert torch.equal(down.view(torch.int16), expert.down_proj.view(torch.int16))


def test_reference_reads_the_same(backend: Backend) -> None:
    """The plain torch version, whose sums have another order."""
    given = problem(70, 22, (14, 2), rows=2, dtype=torch.float32)
    for codec in CODECS:
        out = given.blank()
        head: tuple[Any, ...] = (given.hidden_states, given.topk_ids, given.slot_table)
        if codec == "lossless":
            records = (given.records[codec], 22)
            reference_compact.moe_grouped_lossless_out(*head, *records, SILU, out)
        else:
            codes = (given.base_slots, *given.codes, None)
            reference_compact.moe_grouped_residual_out(
                *head, given.records[codec], *codes, SILU, out
            )
        ours = given.by(backend, codec)
        assert (ours - out).abs().max() < 1e-5 * out.std()
