"""Absorbed latent attention: every instruction set against plain attention of expanded latents."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from speq.kernels import decoder_ops, reference_decoder
from speq.kernels.decoder_ops import Latents, Positions, RMSNorm
from tests.helpers.threads import by_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of results of about one; keys, values and queries are rounded in other places.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
HALVES, PARTED, NEIGHBOURS = "halves", "parted", "neighbours"
pytestmark = pytest.mark.usefixtures("isa")


@dataclass(frozen=True)
class Case:
    """widths: columns of a head's keys that are not rotated, of those that are, of its values, and
    of latents. tree: parents of the nodes behind a root, of which the rows are the last; empty: a
    chain. chosen: share of what rows see that they attend to, besides the first entry.
    """

    rows: int
    start: int
    heads: int
    widths: tuple[int, int, int, int]
    columns: str
    window: int | None = None
    tree: tuple[int, ...] = ()
    chosen: float = 1.0

    @property
    def parents(self) -> Tensor | None:
        return torch.tensor([-1, *self.tree]) if self.tree else None


CASES = [
    Case(1, 0, 1, (1, 2, 1, 1), HALVES),
    Case(1, 5, 4, (8, 4, 6, 16), PARTED),
    Case(3, 37, 9, (24, 16, 10, 40), NEIGHBOURS),
    Case(5, 510, 2, (16, 8, 16, 33), PARTED, 7),
    Case(2, 1300, 17, (16, 8, 24, 64), HALVES, 700),
    Case(5, 2046, 16, (128, 64, 128, 512), NEIGHBOURS),
    Case(8, 37, 3, (8, 8, 12, 24), PARTED, None, (0, 0, 1, 1, 2, 4, 6)),
    Case(3, 509, 12, (16, 4, 8, 32), NEIGHBOURS, None, (0, 0, 0, 2, 3, 5, 5, 6)),
    Case(6, 1022, 4, (20, 6, 8, 48), HALVES, 600, (0, 1, 0, 3, 1)),
    Case(4, 37, 3, (8, 8, 12, 24), PARTED, chosen=0.3),
    Case(3, 2046, 16, (128, 64, 128, 512), PARTED, chosen=0.001),
    Case(3, 509, 12, (16, 4, 8, 32), HALVES, None, (0, 0, 0, 2, 3, 5, 5, 6), 0.02),
    Case(3, 1022, 12, (16, 4, 8, 32), HALVES, None, (0, 0, 0, 2, 3, 5, 5, 6), 0.9),
]


@dataclass
class Problem:
    """Arguments of latent attention over a cache of random entries."""

    queries: Tensor
    latents: Tensor
    parameters: Latents
    positions: Positions
    cached: tuple[Tensor, Tensor]
    value_width: int
    chosen: Tensor | None = None

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> "Problem":
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        key, rotary, value, rank = case.widths
        angles = torch.randn(case.rows, rotary // 2, generator=generator)
        cos, sin = angles.cos(), angles.sin()
        if case.columns != NEIGHBOURS:
            cos, sin = (part.repeat(1, 2).to(dtype) for part in (cos, sin))
        end = case.start + case.rows
        room = end + 3
        chosen = None
        if case.chosen < 1:
            chosen = torch.rand(case.rows, room, generator=generator) < case.chosen
            chosen[:, 0] = True
        expansion = normal(case.heads * (key + value), rank) * rank**-0.5
        return cls(
            normal(case.rows, case.heads * (key + rotary)),
            normal(case.rows, rank + rotary),
            Latents(
                RMSNorm(normal(rank), 1e-5),
                expansion,
                (key + rotary) ** -0.5,
                case.columns != HALVES,
            ),
            Positions(case.start, cos, sin, case.parents),
            (normal(1, room, rank), normal(1, room, rotary)),
            case.heads * value,
            chosen,
        )

    def rows(self, rows: list[int], start: int, parents: Tensor | None = None) -> "Problem":
        """Some of the rows, over the same cache."""
        positions = Positions(start, self.positions.cos[rows], self.positions.sin[rows], parents)
        queries, latents = self.queries[rows], self.latents[rows]
        chosen = self.chosen
        if chosen is not None:
            chosen = chosen[rows]
        return replace(self, queries=queries, latents=latents, positions=positions, chosen=chosen)

    def copy(self) -> "Problem":
        """The same over a cache of its own."""
        return replace(self, cached=(self.cached[0].clone(), self.cached[1].clone()))

    def run(self, window: int | None) -> Tensor:
        out = self.queries.new_empty(len(self.queries), self.value_width)
        decoder_ops.latent_attention(
            self.queries,
            self.latents,
            self.parameters,
            self.positions,
            window,
            self.cached,
            out,
            self.chosen,
        )
        return out

    def expanded(self, window: int | None) -> Tensor:
        """What the reference makes of it, which expands all latents."""
        out = self.queries.new_empty(len(self.queries), self.value_width)
        given, positions = self.parameters, self.positions
        reference_decoder.latent_attention_out(
            self.queries,
            self.latents,
            given.norm.weight,
            given.norm.eps,
            given.expansion,
            positions.cos,
            positions.sin,
            given.interleaved,
            *self.cached,
            positions.start,
            1 << 40 if window is None else window,
            given.scale,
            positions.parents,
            out,
            self.chosen,
        )
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_expanded_attention(case: Case, dtype: torch.dtype) -> None:
    ours, plain = Problem.of(case, dtype), Problem.of(case, dtype)
    attended, wanted = ours.run(case.window), plain.expanded(case.window)
    allowed = TOLERANCE[dtype]
    for mine, theirs in zip(ours.cached, plain.cached, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=allowed, atol=allowed)
    torch.testing.assert_close(attended, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if not case.tree], ids=str)
def test_rows_do_not_depend_on_one_another(case: Case, dtype: torch.dtype) -> None:
    """A drafted token is scored, bit for bit, as it is when it is the only one."""
    together, alone = Problem.of(case, dtype), Problem.of(case, dtype)
    singly = [alone.rows([row], case.start + row).run(case.window) for row in range(case.rows)]
    assert torch.equal(together.run(case.window), torch.cat(singly))
    for mine, theirs in zip(together.cached, alone.cached, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("start", [0, 509])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_branch_is_its_chain(dtype: torch.dtype, start: int, window: int | None) -> None:
    """Bit for bit: each node of a tree as the last of a chain of the nodes above it."""
    tree = (0, 0, 1, 1, 2, 4, 6, 3, 8)
    case = Case(len(tree) + 1, start, 4, (12, 8, 8, 24), PARTED, window, tree)
    paths = [[0]]
    for node, parent in enumerate(tree, start=1):
        paths.append([*paths[parent], node])
    whole = Problem.of(case, dtype)
    # Nodes of one depth are rotated alike.
    depths = torch.tensor([len(path) - 1 for path in paths])
    cos, sin = whole.positions.cos[depths], whole.positions.sin[depths]
    whole.positions = Positions(start, cos, sin, case.parents)
    before = whole.copy()
    attended = whole.run(window)
    for node, path in enumerate(paths):
        assert torch.equal(attended[node], before.copy().rows(path, start).run(window)[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_what_is_seen_may_be_chosen(dtype: torch.dtype) -> None:
    case = CASES[6]
    plain, chosen = Problem.of(case, dtype), Problem.of(case, dtype)
    chosen.chosen = torch.ones(case.rows, case.start + case.rows, dtype=torch.bool)
    assert torch.equal(plain.run(None), chosen.run(None))


def test_it_does_not_depend_on_threads() -> None:
    case = CASES[4]
    results = by_threads(lambda: Problem.of(case, torch.bfloat16).run(case.window))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_is_no_number_stays_none() -> None:
    problem = Problem.of(CASES[2], torch.float32)
    problem.queries[1, 3] = torch.nan  # of the first of nine heads, with ten columns of values
    attended = problem.run(None)
    assert attended[1, :10].isnan().all()
    assert attended[1, 10:].isfinite().all()
    assert attended[[0, 2]].isfinite().all()
