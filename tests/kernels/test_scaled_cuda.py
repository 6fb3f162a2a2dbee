"""The CUDA kernels over codes with scales, on a GPU or on the host, as `make sanitize` builds them.

Words are to be those of the reference, and products those of `moe_grouped` over plain words on the
same backend, bit for bit.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from speq.kernels import reference_scaled
from speq.kernels.checks import activation_numbers
from speq.kernels.scaled_layout import Fp8Layout, Mxfp4Layout, ScaledLayout
from speq.kernels.scaled_words import part_of
from tests.helpers.backends import CUDA_BACKENDS, Backend, backend_named
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering

SEED = 7
EXPERTS, SLOTS = 4, 6
# Rows and columns of FP8 that share a scale; 0: all of them.
BLOCKS = {"fp8": (128, 128), "fp8 rows": (1, 0), "fp8 matrix": (0, 0), "fp8 strips": (1, 128)}
FORMATS = [*BLOCKS, "mxfp4"]
# Hidden size and expert width: whole segments of 32 columns, parts of them, more than a step of 256
# columns, rows that are no whole quads.
SHAPES = {
    "fp8 rows": ((256, 64), (130, 70), (66, 33), (6, 2)),
    "fp8 matrix": ((320, 160), (66, 33)),
    "fp8 strips": ((320, 160), (130, 70)),
    "fp8": ((256, 64), (320, 160), (130, 70), (66, 33), (6, 2)),
    "mxfp4": ((256, 64), (320, 160), (32, 96)),
}
ALL_SHAPES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


def layout_of(format: str, hidden: int, width: int) -> ScaledLayout:
    if format == "mxfp4":
        return Mxfp4Layout(hidden, width)
    return Fp8Layout(hidden, width, *BLOCKS[format])


def arguments_of(format: str) -> tuple[int, ...]:
    return BLOCKS.get(format, ())


def op_of(name: str, format: str) -> str:
    return f"{name}_{format.split()[0]}"


def same_bits(ours: Tensor, wanted: Tensor) -> bool:
    """Equal with signs of zeros; NaNs, whose bits processors choose, where there are NaNs."""
    words = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    nan = wanted.isnan()
    same = (ours.view(words) == wanted.view(words)) | nan
    return bool((same & (ours.isnan() == nan)).all())


def random_record(format: str, hidden: int, width: int, seed: int, any_scale: bool) -> Tensor:
    """Codes of all values but, where scales are usual ones, those that are no numbers."""
    layout = layout_of(format, hidden, width)
    generator = torch.Generator().manual_seed(seed)
    record = torch.randint(256, (layout.nbytes,), generator=generator).byte()
    if any_scale:
        return record
    for section in layout.codes:
        codes = part_of(record, section)
        if format in BLOCKS:
            codes[(codes & 0x7F) == 0x7F] = 0x81
    for section in layout.scales:
        scales = part_of(record, section)
        if format in BLOCKS:
            usual = torch.rand(section.nbytes // 4, generator=generator) * 0.01
            scales.view(torch.float32).copy_(usual)
        else:
            scales.copy_(117 + scales % 8)
    return record


def words_of(format: str, record: Tensor, hidden: int, width: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.empty(2 * width, hidden, dtype=torch.bfloat16)
    down = torch.empty(hidden, width, dtype=torch.bfloat16)
    getattr(reference_scaled, f"{op_of('decode', format)}_out")(
        record, *arguments_of(format), gate_up, down
    )
    return gate_up, down


@pytest.mark.parametrize("any_scale", [False, True], ids=["usual scales", "any scale"])
@pytest.mark.parametrize(("format", "shape"), ALL_SHAPES)
def test_decoded_words(
    backend: Backend, format: str, shape: tuple[int, int], any_scale: bool
) -> None:
    hidden, width = shape
    record = random_record(format, hidden, width, SEED, any_scale)
    wanted = words_of(format, record, hidden, width)
    found = [torch.zeros_like(matrix, device=backend.device) for matrix in wanted]
    op = getattr(getattr(torch.ops, backend.namespace), f"{op_of('decode', format)}_out").default
    op(record.to(backend.device), *arguments_of(format), *found)
    for ours, exact in zip(found, wanted, strict=True):
        assert same_bits(ours.cpu(), exact)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_under_many_scales(backend: Backend, format: str) -> None:
    """All pairs of them, for MXFP4; of FP8 75 scales of any bits."""
    hidden, width = (640, 640) if format in BLOCKS else (256, 256)
    record = random_record(format, hidden, width, SEED + 1, any_scale=True)
    wanted = words_of(format, record, hidden, width)
    found = [torch.zeros_like(matrix, device=backend.device) for matrix in wanted]
    op = getattr(getattr(torch.ops, backend.namespace), f"{op_of('decode', format)}_out").default
    op(record.to(backend.device), *arguments_of(format), *found)
    for ours, exact in zip(found, wanted, strict=True):
        assert same_bits(ours.cpu(), exact)


def in_slots(items: list[Tensor], places: Tensor, gap: int = 0) -> Tensor:
    """Items where they belong; gap: bytes between them."""
    shape = items[0].shape
    room = (shape[0] + gap,) if gap else shape
    slots = torch.zeros(SLOTS, *room, dtype=items[0].dtype)
    for item, place in zip(items, places.tolist(), strict=True):
        slots[place][: len(item)] = item
    return slots


@pytest.mark.parametrize(
    ("each", "dtype", "rows", "gap"),
    covering(ALL_SHAPES, (torch.float32, torch.bfloat16, torch.float16), (1, 2, 3, 9), (64, 4)),
)
def test_products_are_those_of_plain_words(
    backend: Backend, each: tuple[str, tuple[int, int]], dtype: torch.dtype, rows: int, gap: int
) -> None:
    """gap: slots that keep vectors aligned, and slots that do not."""
    format, (hidden, width) = each
    generator = torch.Generator().manual_seed(SEED)
    records = [random_record(format, hidden, width, seed, False) for seed in range(EXPERTS)]
    words = [words_of(format, record, hidden, width) for record in records]
    table = torch.randperm(SLOTS, generator=generator)[:EXPERTS]
    hidden_states = torch.randn(rows, hidden, generator=generator).to(dtype)
    ids = [torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(rows)]
    head = hidden_states, torch.stack(ids), table
    wanted, found = (torch.full((rows, 2, hidden), float("nan"), dtype=dtype) for _ in range(2))
    numbers = activation_numbers(SILU)
    gate_up, down = (in_slots(list(part), table) for part in zip(*words, strict=True))
    backend.run("moe_grouped", *head, gate_up, down, *numbers, wanted)
    held = in_slots(records, table, gap), width, *arguments_of(format)
    backend.run(op_of("moe_grouped", format), *head, *held, *numbers, found)
    assert same_bits(found, wanted)
    assert bool(found.float().isfinite().all())


@pytest.mark.parametrize("format", FORMATS)
def test_records_that_are_too_short_or_not_aligned(backend: Backend, format: str) -> None:
    record = random_record(format, 64, 64, SEED, False).to(backend.device)
    found = [matrix.to(backend.device) for matrix in words_of(format, record.cpu(), 64, 64)]
    op = getattr(getattr(torch.ops, backend.namespace), f"{op_of('decode', format)}_out").default
    with pytest.raises(RuntimeError, match="records must have at least"):
        op(record[:-1].contiguous(), *arguments_of(format), *found)
    shifted = torch.cat([record[:1], record])[1:]
    with pytest.raises(RuntimeError, match="aligned to four"):
        op(shifted, *arguments_of(format), *found)
