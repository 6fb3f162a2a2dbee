"""Every kernel, on every backend there is, against the reference of the same name.

On the CPU each instruction set is a backend. CUDA kernels run on a GPU where there is one, and on
the host, through a shim, where `make sanitize` built them so.

Most problems here are on a grid of whole numbers on which all sums are exact in float32, in any
order: there is one right answer, and a kernel that forgets or doubles anything cannot hide in a
tolerance.

Where factors of a problem multiply, every backend runs cells in which each pair of values of any
two factors occurs; `make test-full` runs the whole product.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels import library, reference
from speq.kernels.checks import activation_numbers
from speq.kernels.ops import Activation
from tests.helpers.backends import CPU_BACKENDS, CUDA_BACKENDS, Backend, backend_named
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering
from tests.reference.experts import gate_up_rows

POISON = float("nan")


@pytest.fixture(params=[*CPU_BACKENDS, *CUDA_BACKENDS])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


@pytest.fixture(params=CPU_BACKENDS)
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


RELU = Activation("relu")


@dataclass(frozen=True)
class Int4Problem:
    """Arguments of moe_int4, by name, in its order."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    base_slots: Tensor
    gate_up_qweight: Tensor
    gate_up_scales: Tensor
    down_qweight: Tensor
    down_scales: Tensor
    input_perm: Tensor | None = None
    activation: Activation = RELU

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Everything up to the activation."""
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-1])

    def wanted(self) -> Tensor:
        out = torch.full_like(self.hidden_states, POISON)
        reference.moe_int4_out(*self.inputs, self.activation, out)
        return out

    def by(self, backend: Backend) -> Tensor:
        out = torch.full_like(self.hidden_states, POISON)
        backend.run("moe_int4", *self.inputs, *activation_numbers(self.activation), out)
        return out


def route(rows: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])


def codes_and_scales(
    slots: int, rows: int, columns: int, group: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random codes, and scales of a half or one: sums stay exact."""
    shape = (slots, rows, columns // 2)
    qweight = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    halves = torch.randint(1, 3, (slots, rows, columns // group), generator=generator)
    return qweight, (halves * 0.5).half()


def int4_problem(
    rows: int = 3,
    top_k: int = 2,
    hidden_size: int = 256,
    width: int = 128,
    groups: tuple[int, int] = (128, 64),
    experts: int = 9,
    slots: int = 11,
    seed: int = 1,
) -> Int4Problem:
    """On the grid: inputs are whole, and the largest of each block is 127, so its scale is 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-127, 128, (rows, hidden_size), generator=generator).float()
    hidden[:, :: reference.INT8_BLOCK] = 127
    return Int4Problem(
        hidden,
        route(rows, top_k, experts, generator),
        torch.rand(rows, top_k, generator=generator),
        torch.randperm(slots, generator=generator)[:experts],
        *codes_and_scales(slots, 2 * width, hidden_size, groups[0], generator),
        *codes_and_scales(slots, hidden_size, width, groups[1], generator),
    )


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of the sums of the second product, relative to the row."""
    assert ours.dtype == wanted.dtype
    scale = wanted.double().abs().amax(dim=-1, keepdim=True)
    eps = torch.finfo(ours.dtype).eps
    error = (ours.double() - wanted.double()).abs()
    assert (error <= scale * max(2e-6, 1.01 * eps)).all(), (error / scale).max()


ROWS = (1, 2, 3, 7, 16)
# Hidden size, expert width, and the group sizes of both products.
SHAPES = (
    (256, 128, (128, 64)),
    (384, 160, (128, 32)),
    (128, 96, (64, 96)),  # one scale to a row of down
    (64, 32, (32, 32)),
    (200, 72, (200, 72)),  # one scale to a row, and no multiple of a vector
    (96, 40, (32, 8)),
    (100, 36, (20, 4)),  # groups that no vector takes
    (6, 2, (2, 2)),
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("hidden_size", "width", "groups"), SHAPES)
def test_moe_int4(
    backend: Backend, rows: int, hidden_size: int, width: int, groups: tuple[int, int]
) -> None:
    problem = int4_problem(rows, 3, hidden_size, width, groups)
    assert_close(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("top_k", range(1, 9))
def test_moe_int4_routes_of_every_length(backend: Backend, top_k: int) -> None:
    problem = int4_problem(5, top_k, 96, 64, (32, 64))
    assert_close(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_moe_int4_all_rows_on_one_expert(backend: Backend, rows: int) -> None:
    problem = int4_problem(rows, 1)
    problem = replace(problem, topk_ids=torch.full((rows, 1), 4))
    assert_close(problem.by(backend), problem.wanted())


def test_moe_int4_an_expert_twice_in_a_route(backend: Backend) -> None:
    problem = int4_problem(3, 4)
    ids = torch.tensor([[1, 1, 2, 1], [0, 2, 2, 0], [5, 5, 5, 5]])
    problem = replace(problem, topk_ids=ids)
    assert_close(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("hidden_size", [256, 100])
def test_moe_int4_permuted_inputs(backend: Backend, rows: int, hidden_size: int) -> None:
    problem = int4_problem(rows, 3, hidden_size, 64, (hidden_size, 64))
    generator = torch.Generator().manual_seed(3)
    perms = [torch.randperm(hidden_size, generator=generator) for _ in range(11)]
    # Only 0 and 127, so that the scale of a block is 1 wherever its inputs come from.
    hidden = 127.0 * torch.randint(-1, 2, (rows, hidden_size), generator=generator)
    problem = replace(problem, hidden_states=hidden, input_perm=torch.stack(perms).int())
    wanted = problem.wanted()
    assert_close(problem.by(backend), wanted)
    assert not torch.equal(wanted, replace(problem, input_perm=None).wanted())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_moe_int4_dtypes(backend: Backend, dtype: torch.dtype) -> None:
    """Inputs up to 127 are exact in all of them; small scales keep float16 from overflowing."""
    problem = int4_problem(3, 2)
    problem = replace(
        problem,
        hidden_states=problem.hidden_states.to(dtype),
        down_scales=problem.down_scales / 2**20,
    )
    assert problem.wanted().abs().max() < 3e4
    assert_close(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("activation", sorted(library.ACTIVATION_CODES))
def test_moe_int4_activations(backend: Backend, activation: str) -> None:
    """Off the grid: where a value lies on the edge between two INT8 codes, sums in another order
    may round it the other way, which moves outputs by one step of one input."""
    problem = int4_problem(4, 2)
    generator = torch.Generator().manual_seed(7)
    of_up = slice(gate_up_rows(activation, 128))
    problem = replace(
        problem,
        hidden_states=torch.randn(4, 256, generator=generator),
        gate_up_qweight=problem.gate_up_qweight[:, of_up].contiguous(),
        gate_up_scales=problem.gate_up_scales[:, of_up].contiguous() / 64,
        activation=Activation(activation),
    )
    ours, wanted = problem.by(backend), problem.wanted()
    error = (ours - wanted).abs().amax(1) / wanted.std()
    assert (error <= 0.02).all()
    assert (error <= 2e-5).sum() >= 2


def test_moe_int4_zeros_and_what_is_no_number(backend: Backend) -> None:
    """A row of zeros is zero; one with an infinity or a NaN in it is NaN, others unharmed."""
    problem = int4_problem(5, 2)
    hidden = problem.hidden_states.clone()
    hidden[0] = 0
    hidden[1, 40] = torch.inf
    hidden[2, 255] = torch.nan
    hidden[3] = 1e-38  # the inverse of its scale would be infinite
    broken = replace(problem, hidden_states=hidden).by(backend)
    assert (broken[0] == 0).all()
    assert broken[1:3].isnan().all()
    assert (broken[3] == 0).all()
    assert torch.equal(broken[4], problem.by(backend)[4])


def test_moe_int4_row_alone_and_in_company(backend: Backend) -> None:
    problem = int4_problem(16, 4, 384, 160, (128, 32))
    together = problem.by(backend)
    for row in range(16):
        alone = replace(
            problem,
            hidden_states=problem.hidden_states[row : row + 1],
            topk_ids=problem.topk_ids[row : row + 1],
            topk_weights=problem.topk_weights[row : row + 1],
        )
        assert torch.equal(alone.by(backend)[0], together[row])


# Columns, and the size of their groups.
INT4_COLUMNS = ((256, 128), (96, 32), (200, 200), (36, 4), (2, 2))


@pytest.mark.parametrize(("rows", "shape", "permuted"), covering(ROWS, INT4_COLUMNS, (False, True)))
def test_linear_int4(backend: Backend, rows: int, shape: tuple[int, int], permuted: bool) -> None:
    columns, group = shape
    generator = torch.Generator().manual_seed(5)
    qweight, scales = codes_and_scales(1, 70, columns, group, generator)
    inputs = 127.0 * torch.randint(-1, 2, (rows, columns), generator=generator)
    perm = torch.randperm(columns, generator=generator).int() if permuted else None
    ours, wanted = (torch.full((rows, 70), POISON) for _ in range(2))
    backend.run("linear_int4", inputs, qweight[0], scales[0], perm, ours)
    reference.linear_int4_out(inputs, qweight[0], scales[0], perm, wanted)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [2, 32])  # the plain loop, and vectors
def test_linear_int4_every_scale(backend: Backend, dtype: torch.dtype, columns: int) -> None:
    """All 65,536 float16 scales, subnormals, infinities and NaNs among them, times 127."""
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    qweight = torch.full((2**16, columns // 2), 0x88, dtype=torch.uint8)
    qweight[:, 0] = 0x89
    inputs = torch.zeros(1, columns, dtype=dtype)
    inputs[0, 0] = 127
    out = torch.full((1, 2**16), POISON, dtype=dtype)
    backend.run("linear_int4", inputs, qweight, scales[:, None].contiguous(), None, out)
    wanted = (127 * scales.double()).to(dtype)
    # An infinite scale makes a NaN of the zeros beside it, in some orders.
    finite = scales.isfinite()
    assert torch.equal(out[0].isfinite() & finite, wanted.isfinite() & finite)
    assert not out[0][~finite].isfinite().any()
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    numbers = finite & (wanted != 0)  # a sum of zeros has no sign
    assert torch.equal(out[0].view(words)[numbers], wanted.view(words)[numbers])
    assert (out[0][wanted == 0] == 0).all()


@dataclass(frozen=True)
class GroupedProblem:
    """Arguments of moe_grouped, by name, in its order."""

    hidden_states: Tensor
    topk_ids: Tensor
    slot_table: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    activation: Activation = RELU

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-1])

    def blank(self) -> Tensor:
        shape = (*self.topk_ids.shape, self.hidden_states.shape[1])
        return torch.full(shape, POISON, dtype=self.hidden_states.dtype)

    def wanted(self, out: Tensor | None = None) -> Tensor:
        out = self.blank() if out is None else out
        reference.moe_grouped_out(*self.inputs, self.activation, out)
        return out

    def by(self, backend: Backend, out: Tensor | None = None) -> Tensor:
        out = self.blank() if out is None else out
        backend.run("moe_grouped", *self.inputs, *activation_numbers(self.activation), out)
        return out


def grouped_problem(
    rows: int = 3,
    top_k: int = 2,
    hidden_size: int = 96,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
    words: torch.dtype = torch.bfloat16,
    experts: int = 9,
    slots: int = 11,
) -> GroupedProblem:
    """On the grid: every value and every sum is whole and small enough for float32."""
    generator = torch.Generator().manual_seed(2)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    arena = whole(-1, 1, slots, 3 * width * hidden_size).to(words)
    split = 2 * width * hidden_size
    return GroupedProblem(
        whole(-2, 2, rows, hidden_size).to(dtype),
        route(rows, top_k, experts, generator),
        torch.randperm(slots, generator=generator)[:experts],
        # Slots as an arena holds them: both matrices of an expert one after the other.
        arena[:, :split].unflatten(1, (2 * width, hidden_size)),
        arena[:, split:].unflatten(1, (hidden_size, width)),
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Hidden size and expert width: whole vectors, parts of one, and single elements.
GROUPED_SHAPES = ((96, 64), (128, 48), (100, 36), (33, 17), (5, 3), (264, 1))


@pytest.mark.parametrize(("rows", "shape", "words"), covering(ROWS, GROUPED_SHAPES, DTYPES))
def test_moe_grouped(
    backend: Backend, rows: int, shape: tuple[int, int], words: torch.dtype
) -> None:
    problem = grouped_problem(rows, 3, *shape, words=words)
    assert torch.equal(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("words", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_grouped_rounds_where_transformers_does(
    backend: Backend, dtype: torch.dtype, words: torch.dtype
) -> None:
    """Whole numbers are not whole for long in 16 bits; every rounding must be the reference's."""
    problem = grouped_problem(7, 3, 160, 72, dtype, words)
    ours, wanted = problem.by(backend), problem.wanted()
    assert torch.equal(ours, wanted)
    if dtype != torch.float32:
        wide = replace(problem, hidden_states=problem.hidden_states.float())
        assert not torch.equal(wanted.float(), wide.wanted())


@pytest.mark.parametrize("top_k", range(1, 9))
def test_moe_grouped_routes_of_every_length(backend: Backend, top_k: int) -> None:
    problem = grouped_problem(5, top_k)
    assert torch.equal(problem.by(backend), problem.wanted())


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_moe_grouped_all_rows_on_one_expert(backend: Backend, rows: int) -> None:
    problem = replace(grouped_problem(rows, 1), topk_ids=torch.full((rows, 1), 4))
    assert torch.equal(problem.by(backend), problem.wanted())


# Rows by three experts, so that inputs are laid into panels: more than are laid at once, too.
PROMPT_ROWS = (100, 130, 1100)
# Both in more columns than a block has, and more outputs than a tile, and in odd numbers of them.
PROMPT_SHAPES = ((96, 64), (100, 36), (33, 17), (700, 40), (48, 400))


@pytest.mark.parametrize(
    ("rows", "shape", "words", "dtype"), covering(PROMPT_ROWS, PROMPT_SHAPES, DTYPES, DTYPES)
)
def test_moe_grouped_of_a_prompt(
    cpu_backend: Backend,
    rows: int,
    shape: tuple[int, int],
    words: torch.dtype,
    dtype: torch.dtype,
) -> None:
    problem = grouped_problem(rows, 2, *shape, dtype, words, experts=3, slots=4)
    assert torch.equal(problem.by(cpu_backend), problem.wanted())


@pytest.mark.parametrize("words", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_prompt_is_what_it_is_beside_others(
    cpu_backend: Backend, words: torch.dtype
) -> None:
    """Off the grid, where an order of sums shows: other rows, other panels, one expert less."""
    generator = torch.Generator().manual_seed(12)
    problem = grouped_problem(300, 2, 200, 72, words, words, experts=3, slots=4)
    problem = replace(
        problem,
        hidden_states=torch.randn(300, 200, generator=generator).to(words),
        gate_up_proj=torch.randn(4, 144, 200, generator=generator).mul(0.1).to(words),
        down_proj=torch.randn(4, 200, 72, generator=generator).mul(0.1).to(words),
    )
    whole = problem.by(cpu_backend)
    fewer = replace(
        problem, hidden_states=problem.hidden_states[41:], topk_ids=problem.topk_ids[41:]
    )
    assert torch.equal(fewer.by(cpu_backend), whole[41:])
    table = problem.slot_table.clone()
    table[0] = -1
    there = problem.topk_ids != 0
    assert torch.equal(replace(problem, slot_table=table).by(cpu_backend)[there], whole[there])


def test_moe_grouped_an_expert_twice_in_a_route(backend: Backend) -> None:
    ids = torch.tensor([[1, 1, 2, 1], [0, 2, 2, 0], [5, 5, 5, 5]])
    problem = replace(grouped_problem(3, 4), topk_ids=ids)
    assert torch.equal(problem.by(backend), problem.wanted())


def test_moe_grouped_leaves_absent_experts_alone(backend: Backend) -> None:
    """In waves, each experts' rows appear with its wave and stay."""
    problem = grouped_problem(6, 3)
    whole, out = problem.wanted(), problem.blank()
    seen = torch.zeros(6, 3, dtype=torch.bool)
    for wave in ([1, 4], [0, 8], [2, 3, 5, 6, 7]):
        table = torch.full((9,), -1)
        table[wave] = problem.slot_table[wave]
        replace(problem, slot_table=table).by(backend, out)
        seen |= torch.isin(problem.topk_ids, torch.tensor(wave))
        assert torch.equal(out[seen], whole[seen])
        assert out[~seen].isnan().all()
    assert seen.all()


@pytest.mark.parametrize("words", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(library.ACTIVATION_CODES))
def test_moe_grouped_off_the_grid(backend: Backend, activation: str, words: torch.dtype) -> None:
    """Against the reference in double precision."""
    generator = torch.Generator().manual_seed(8)
    problem = grouped_problem(7, 3, 200, 72, words=words)
    of_up = gate_up_rows(activation, 72)
    gate_up = torch.randn(11, of_up, 200, generator=generator).mul(0.1).to(words)
    down = torch.randn(11, 200, 72, generator=generator).mul(0.1).to(words)
    problem = replace(
        problem,
        hidden_states=torch.randn(7, 200, generator=generator),
        gate_up_proj=gate_up,
        down_proj=down,
        activation=Activation(activation),
    )
    exact = replace(problem, hidden_states=problem.hidden_states.double()).wanted()
    error = (problem.by(backend) - exact).abs().max() / exact.std()
    assert error < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_grouped_row_alone_and_in_company(backend: Backend, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    problem = grouped_problem(16, 4, 200, 72, dtype)
    problem = replace(
        problem,
        hidden_states=torch.randn(16, 200, generator=generator).to(dtype),
        gate_up_proj=torch.randn(11, 144, 200, generator=generator).bfloat16(),
        down_proj=torch.randn(11, 200, 72, generator=generator).bfloat16(),
        activation=SILU,
    )
    together = problem.by(backend)
    for rows in ([0], [5], [15], [2, 3], [1, 4, 9, 11, 13]):
        part = replace(
            problem, hidden_states=problem.hidden_states[rows], topk_ids=problem.topk_ids[rows]
        )
        assert torch.equal(part.by(backend), together[rows])


@pytest.mark.parametrize("place", [(0, 0), (2, 1)])
@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_ids_out_of_range(backend: Backend, place: tuple[int, int], wrong: int) -> None:
    """An error that names the argument; on a GPU, whose answer nobody waits for, rows of NaN."""
    for problem, message in (
        (int4_problem(3, 2), "experts of base_slots"),
        (grouped_problem(3, 2), "experts of slot_table"),
    ):
        ids = problem.topk_ids.clone()
        ids[place] = wrong
        broken = replace(problem, topk_ids=ids)
        message = f"topk_ids holds {wrong}; there are 9 {message}"
        with pytest.raises(IndexError, match=message):
            broken.wanted()
        if backend.name.startswith("cpu"):
            with pytest.raises(IndexError, match=message):
                broken.by(backend)
            continue
        ours, whole = broken.by(backend), problem.by(backend)
        at = place if ours.dim() == 3 else place[:1]
        assert ours[at].isnan().all()
        ours[at] = whole[at]
        assert torch.equal(ours, whole)


@pytest.mark.parametrize("wrong", [11, -2])
def test_slots_out_of_range(backend: Backend, wrong: int) -> None:
    int4, grouped = int4_problem(3, 2), grouped_problem(3, 2)
    table = int4.base_slots.clone()
    table[int(int4.topk_ids[1, 0])] = wrong
    broken = replace(int4, base_slots=table)
    reached = (int4.topk_ids == int4.topk_ids[1, 0]).any(1)
    if backend.name.startswith("cpu"):
        with pytest.raises(IndexError, match=f"base_slots holds {wrong}; there are 11"):
            broken.by(backend)
    else:
        assert torch.equal(broken.by(backend).isnan().all(1), reached)
    if wrong > 0:
        table = grouped.slot_table.clone()
        table[int(grouped.topk_ids[1, 0])] = wrong
        odd = replace(grouped, slot_table=table)
        if backend.name.startswith("cpu"):
            with pytest.raises(IndexError, match=f"slot_table holds {wrong}; there are 11"):
                odd.by(backend)
        else:
            missing = grouped.topk_ids == grouped.topk_ids[1, 0]
            assert torch.equal(odd.by(backend).isnan().all(2), missing)


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 100_003])
def test_read_sum(backend: Backend, count: int) -> None:
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    out = torch.full((1,), 77)
    backend.run("read_sum", words, out)
    wanted = sum(words.tolist())
    assert int(out) == (wanted + 2**63) % 2**64 - 2**63


LINEAR_ROWS = (1, 2, 3, 4, 5, 7, 8, 16)
# Columns and outputs.
LINEAR_SHAPES = ((96, 70), (33, 5), (200, 129), (1, 1), (16, 3))


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "biased"),
    covering(LINEAR_ROWS, LINEAR_SHAPES, DTYPES, (False, True)),
)
def test_linear(
    cpu_backend: Backend, rows: int, shape: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    """Whole numbers, against int64; rounded once to the dtype, or not at all to float32."""
    columns, outputs = shape
    generator = torch.Generator().manual_seed(14)
    inputs = torch.randint(-5, 6, (rows, columns), generator=generator)
    weight = torch.randint(-9, 10, (outputs, columns), generator=generator)
    bias = torch.randint(-99, 100, (outputs,), generator=generator)
    wanted = inputs @ weight.T + (bias if biased else 0)
    out = torch.full((rows, outputs), POISON, dtype=dtype)
    given = bias.to(dtype) if biased else None
    cpu_backend.run("linear", inputs.to(dtype), weight.to(dtype), given, out)
    assert torch.equal(out, wanted.to(dtype))
    wide = torch.full((rows, outputs), POISON)
    cpu_backend.run("linear", inputs.to(dtype), weight.to(dtype), given, wide)
    assert torch.equal(wide, wanted.float())


def test_linear_row_alone_and_in_company(cpu_backend: Backend) -> None:
    generator = torch.Generator().manual_seed(15)
    inputs = torch.randn(16, 200, generator=generator)
    weight = torch.randn(70, 200, generator=generator)
    together = torch.empty(16, 70)
    cpu_backend.run("linear", inputs, weight, None, together)
    for rows in ([0], [5], [15], [2, 3], [1, 4, 9, 11, 13]):
        part = torch.empty(len(rows), 70)
        cpu_backend.run("linear", inputs[rows], weight, None, part)
        assert torch.equal(part, together[rows])


@pytest.mark.parametrize("op", ["linear", "linear_int4", "moe_grouped", "moe_int4", "read_sum"])
def test_nothing_beside_the_output_is_written(backend: Backend, op: str) -> None:
    """Outputs lie in the middle of a larger tensor."""
    problem: Any
    if op == "moe_int4":
        problem = int4_problem(3, 2)
        arguments = (*problem.inputs, *activation_numbers(SILU))
        wanted = replace(problem, activation=SILU).wanted()
    elif op == "moe_grouped":
        problem = grouped_problem(3, 2)
        arguments = (*problem.inputs, *activation_numbers(problem.activation))
        wanted = problem.wanted()
    elif op == "linear_int4":
        problem = int4_problem(3, 2)
        matrix = (problem.down_qweight[0], problem.down_scales[0])
        inputs = problem.hidden_states[:, :128].contiguous()
        arguments = (inputs, *matrix, None)
        wanted = torch.empty(3, 256)
        reference.linear_int4_out(*arguments, wanted)
    elif op == "linear":
        if not backend.name.startswith("cpu"):
            pytest.skip("on a GPU this is torch's own")
        arguments = (torch.full((3, 50), 2.0), torch.full((40, 50), 3.0), None)
        wanted = torch.full((3, 40), 300.0)
    else:
        arguments = (torch.arange(100),)
        wanted = torch.tensor([4950])
    poison = -12345
    around = torch.full((wanted.shape[0] + 2, *wanted.shape[1:]), poison, dtype=wanted.dtype)
    backend.run(op, *arguments, around[1:-1])
    assert (around[0] == poison).all()
    assert (around[-1] == poison).all()
    if op != "moe_int4":
        assert torch.equal(around[1:-1], wanted)
    assert (around[1:-1] != poison).all()
