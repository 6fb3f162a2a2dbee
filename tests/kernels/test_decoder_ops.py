"""What decoder layers do between their products: every instruction set against plain torch."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from speq.kernels import decoder_ops, reference_decoder
from speq.kernels.decoder_ops import Heads, Positions, RMSNorm, RouterRule
from tests.helpers.threads import by_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums are added up in another order; one rounding of the dtype may then fall the other way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
pytestmark = pytest.mark.usefixtures("isa")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    allowed = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(ours, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (1, 16), (2, 33), (5, 256)])
def test_norm_is_transformers(rows: int, columns: int, dtype: torch.dtype) -> None:
    inputs, others = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype, seed=1)
    norm = RMSNorm(normal(columns, dtype=dtype, seed=2), 1e-6)
    wanted, sums = torch.empty_like(inputs), torch.empty_like(inputs)
    reference_decoder.rms_norm_out(inputs, None, norm.weight, norm.eps, None, wanted)
    assert_close(decoder_ops.rms_norm(inputs, norm), wanted)
    reference_decoder.rms_norm_out(inputs, others, norm.weight, norm.eps, sums, wanted)
    our_sums, ours = decoder_ops.add_rms_norm(inputs, others, norm)
    assert torch.equal(our_sums, sums)
    assert torch.equal(sums, inputs + others)
    assert_close(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_rows_have_norms_of_their_own(dtype: torch.dtype) -> None:
    inputs, weight = normal(6, 33, dtype=dtype), normal(3 * 33, seed=1)
    ours = decoder_ops.rms_norm(inputs, RMSNorm(weight, 1e-6))
    for row in range(6):
        own = RMSNorm(weight.view(3, 33)[row % 3].clone(), 1e-6)
        assert torch.equal(ours[row : row + 1], decoder_ops.rms_norm(inputs[row : row + 1], own))
    wanted = torch.empty_like(inputs)
    reference_decoder.rms_norm_out(inputs, None, weight, 1e-6, None, wanted)
    assert_close(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_token_are_mixed_and_added_to(dtype: torch.dtype) -> None:
    """As Qwen4-Exp's gated residual and its decoder layer do, with torch's roundings."""
    rows, gates = normal(5, 3 * 37, dtype=dtype), normal(5, 3 * 37, dtype=dtype, seed=1)
    terms = (gates.sigmoid() * rows).double().view(5, 3, 37)
    assert_close(decoder_ops.mix_streams(rows, gates, 3), (terms.sum(1) / 3).to(dtype))
    for streams in (0, 2):
        with pytest.raises(ValueError, match=f"has 111 columns; they must be of {streams} rows"):
            decoder_ops.mix_streams(rows, gates, streams)
    update, logits = normal(5, 37, dtype=dtype, seed=2), normal(5, 3, dtype=dtype, seed=3)
    added = [update * (2 * (logits[:, n : n + 1] / 3).sigmoid()) for n in range(3)]
    assert_close(decoder_ops.add_streams(rows, update, logits), rows + torch.cat(added, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_by_a_wide_weight_rounds_once(dtype: torch.dtype) -> None:
    inputs, others = normal(7, 96, dtype=dtype), normal(7, 96, dtype=dtype, seed=3)
    norm = RMSNorm(normal(96, seed=1) + 1, 1e-6)
    wide = (inputs + others).double()
    scaled = norm.weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    sums, ours = decoder_ops.add_rms_norm(inputs, others, norm)
    assert torch.equal(sums, inputs + others)
    if dtype == torch.float32:
        torch.testing.assert_close(ours.double(), scaled, rtol=1e-6, atol=1e-6)
    else:  # but where float32 sums fall on the other side of a middle
        assert (ours == scaled.to(dtype)).float().mean() > 0.995
    reference_decoder.rms_norm_out(inputs, others, norm.weight, norm.eps, sums, inputs)
    assert_close(ours, inputs)


def test_norm_rounds_twice() -> None:
    """As transformers does: what is rounded before the weight is not what is rounded behind it."""
    inputs, weight = normal(64, 96, dtype=torch.bfloat16), normal(96, dtype=torch.bfloat16, seed=1)
    wide = inputs.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    ours = decoder_ops.rms_norm(inputs, RMSNorm(weight, 1e-6))
    same = (ours == weight * scaled.bfloat16()).float().mean()
    once = (ours == (weight.float() * scaled).bfloat16()).float().mean()
    assert same > 0.999
    assert once < 0.9


@dataclass(frozen=True)
class AttentionCase:
    """norm: columns that a norm of queries and keys takes, 0 for none, -1 for all of a row.
    tree: parents of the nodes behind a root; empty: a chain. values: columns of a head of values, 0
    for those of keys. chosen: share of what rows see that they attend to, besides their own.
    """

    rows: int
    start: int
    heads: int
    kv_heads: int
    width: int
    rotary: int
    norm: int
    window: int | None
    tree: tuple[int, ...] = ()
    values: int = 0
    chosen: float = 1.0

    @property
    def parents(self) -> Tensor | None:
        """Of a tree's nodes, the last of which the rows are; None: they are a chain."""
        return torch.tensor([-1, *self.tree]) if self.tree else None


CASES = [
    AttentionCase(1, 0, 1, 1, 2, 2, 0, None),
    AttentionCase(1, 5, 4, 4, 64, 64, 0, None),
    AttentionCase(5, 37, 4, 2, 32, 16, 32, None),
    AttentionCase(3, 9, 6, 3, 10, 4, -1, 4),
    AttentionCase(16, 3, 4, 1, 24, 24, 24, 5),
    AttentionCase(2, 511, 2, 1, 16, 16, 0, None),
    AttentionCase(4, 1030, 2, 2, 136, 8, 0, 600),
    AttentionCase(1, 700, 8, 2, 80, 80, 0, 100),
    AttentionCase(5, 3000, 9, 1, 64, 64, 0, None),
    AttentionCase(3, 2046, 16, 4, 128, 128, 128, 1500),
    AttentionCase(5, 37, 4, 2, 24, 8, 0, None, values=16),
    AttentionCase(2, 700, 4, 1, 16, 16, 16, 100, values=40),
    AttentionCase(4, 1030, 6, 2, 16, 16, 0, None, values=24, chosen=0.3),
    AttentionCase(3, 700, 4, 2, 16, 16, 16, 650, chosen=0.9),
]


@dataclass
class Problem:
    """Arguments of attention over a cache of random entries."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    heads: Heads
    positions: Positions
    cached: tuple[Tensor, Tensor]
    chosen: Tensor | None = None

    @classmethod
    def of(cls, case: AttentionCase, dtype: torch.dtype) -> "Problem":
        value_width = case.values or case.width

        def rows(heads: int, seed: int, width: int = case.width) -> Tensor:
            return normal(case.rows, heads * width, dtype=dtype, seed=seed)

        def norm(heads: int, seed: int) -> RMSNorm | None:
            columns = heads * case.width if case.norm < 0 else case.norm
            return RMSNorm(normal(columns, dtype=dtype, seed=seed), 1e-5) if columns else None

        angles = normal(case.rows, case.rotary // 2, seed=8).repeat(1, 2)
        entries = case.kv_heads, case.start + case.rows + 3
        chosen = None
        if case.chosen < 1:
            chosen = normal(case.rows, entries[1], seed=9).sigmoid() < case.chosen
            chosen.diagonal(case.start).fill_(True)
        return cls(
            rows(case.heads, 1),
            rows(case.kv_heads, 2),
            rows(case.kv_heads, 3, value_width),
            Heads(case.width**-0.5, norm(case.heads, 4), norm(case.kv_heads, 5)),
            Positions(case.start, angles.cos().to(dtype), angles.sin().to(dtype), case.parents),
            (
                normal(*entries, case.width, dtype=dtype, seed=6),
                normal(*entries, value_width, dtype=dtype, seed=7),
            ),
            chosen,
        )

    def part(self, first: int, last: int) -> "Problem":
        """Some of the rows, over the same cache."""
        at, rows = self.positions, slice(first, last)
        positions = Positions(at.start + first, at.cos[rows], at.sin[rows])
        parts = (self.queries[rows], self.keys[rows], self.values[rows])
        chosen = None if self.chosen is None else self.chosen[rows]
        return Problem(*parts, self.heads, positions, self.cached, chosen)

    def run(self, window: int | None) -> Tensor:
        keys, values = self.cached
        heads = self.queries.shape[1] // keys.shape[2]
        out = self.queries.new_empty(len(self.queries), heads * values.shape[2])
        decoder_ops.attention(
            self.queries,
            self.keys,
            self.values,
            self.heads,
            self.positions,
            window,
            self.cached,
            out,
            self.chosen,
        )
        return out


# Whole trees, and trees of which earlier passes have run some nodes.
TREES = [
    AttentionCase(4, 0, 2, 1, 16, 16, 0, None, (0, 0, 1)),
    AttentionCase(8, 37, 4, 2, 192, 64, 0, 9, (0, 0, 1, 1, 2, 4, 6), 128),
    AttentionCase(8, 37, 4, 2, 32, 16, 32, None, (0, 0, 1, 1, 2, 4, 6)),
    AttentionCase(8, 37, 4, 2, 32, 16, 0, 3, (0, 0, 1, 1, 2, 4, 6)),
    AttentionCase(1, 9, 6, 3, 10, 4, -1, 4, (0, 1, 0, 3, 2)),
    AttentionCase(3, 509, 2, 2, 24, 24, 0, None, (0, 0, 0, 2, 3, 5, 5, 6)),
    AttentionCase(6, 1022, 4, 1, 136, 8, 0, 600, (0, 1, 0, 3, 1)),
    AttentionCase(6, 2045, 6, 1, 48, 48, 0, None, (0, 1, 0, 3, 1)),
    AttentionCase(6, 509, 6, 2, 48, 48, 0, None, (0, 1, 0, 3, 1), chosen=0.5),
    AttentionCase(40, 60, 2, 1, 16, 16, 0, 7, tuple(at * at % (at + 1) for at in range(39))),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *TREES], ids=str)
def test_attention_is_torchs(case: AttentionCase, dtype: torch.dtype) -> None:
    ours, plain = Problem.of(case, dtype), Problem.of(case, dtype)
    wanted = plain.queries.new_empty(case.rows, case.heads * (case.values or case.width))
    norms = (ours.heads.query_norm, ours.heads.key_norm)
    weights = [None if norm is None else norm.weight for norm in norms]
    reference_decoder.attention_out(
        plain.queries,
        plain.keys,
        plain.values,
        *weights,
        1e-5,
        plain.positions.cos,
        plain.positions.sin,
        *plain.cached,
        case.start,
        case.window or 1 << 40,
        case.width**-0.5,
        case.parents,
        wanted,
        chosen=plain.chosen,
    )
    attended = ours.run(case.window)
    for mine, theirs in zip(ours.cached, plain.cached, strict=True):
        # Turned after a norm that may round the other way: a step of the dtype, of larger numbers.
        allowed = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(mine, theirs, rtol=allowed, atol=allowed)
    allowed = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(attended, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize(("case", "dtype"), list(product(CASES[2:], DTYPES)), ids=str)
def test_rows_do_not_depend_on_one_another(case: AttentionCase, dtype: torch.dtype) -> None:
    """A drafted token is scored, bit for bit, as it is when it is the only one."""
    together, alone = Problem.of(case, dtype), Problem.of(case, dtype)
    rows = [alone.part(row, row + 1).run(case.window) for row in range(case.rows)]
    assert torch.equal(together.run(case.window), torch.cat(rows))
    for mine, theirs in zip(together.cached, alone.cached, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES[-2:], ids=str)
def test_attention_does_not_depend_on_threads(case: AttentionCase) -> None:
    results = by_threads(lambda: Problem.of(case, torch.bfloat16).run(case.window))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in (*CASES, *TREES) if not case.norm], ids=str)
def test_attention_with_sinks_is_that_of_gpt_oss(case: AttentionCase, dtype: torch.dtype) -> None:
    """Of transformers' own eager attention, over the entries that the op wrote, and masks that are
    added; and a sink that is far below all scores is none.
    """
    problem, sinks = Problem.of(case, dtype), normal(case.heads, dtype=dtype, seed=9)
    problem.heads = replace(problem.heads, sinks=sinks)
    attended = problem.run(case.window)
    end = case.start + case.rows
    parents = [-1, *case.tree] if case.tree else list(range(-1, case.rows - 1))
    root = end - len(parents)
    mask = torch.full((case.rows, end), torch.finfo(dtype).min, dtype=dtype)
    for row in range(case.rows):
        path = path_to(len(parents) - case.rows + row, parents)
        seen = [*range(root), *(root + node for node in path)]
        mask[row, seen[-(case.window or end) :]] = 0
    if problem.chosen is not None:
        mask[~problem.chosen[:, :end]] = torch.finfo(dtype).min
    turned = Problem.of(case, dtype)
    queries = torch.zeros_like(turned.queries)
    # Its queries, as the op turns them: as keys of as many heads.
    room = [torch.zeros(case.heads, end, case.width, dtype=dtype) for _ in range(2)]
    decoder_ops.attention(
        turned.queries,
        turned.queries,
        turned.queries,
        Heads(1.0),
        replace(turned.positions, parents=None),
        None,
        (room[0], room[1]),
        queries,
    )
    module = torch.nn.Module()
    module.num_key_value_groups = case.heads // case.kv_heads
    module.sinks = torch.nn.Parameter(sinks)
    wanted, _ = eager_attention_forward(
        module.eval(),
        room[0][None, :, case.start :],
        problem.cached[0][None, :, :end],
        problem.cached[1][None, :, :end],
        mask[None, None],
        scaling=case.width**-0.5,
    )
    allowed = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(
        attended, wanted[0].reshape(case.rows, -1).detach(), rtol=allowed, atol=allowed
    )
    problem.heads = replace(problem.heads, sinks=torch.full_like(sinks, -200.0))
    assert torch.equal(problem.run(case.window), Problem.of(case, dtype).run(case.window))


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root down to one."""
    return [0] if node == 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("start", [0, 37, 509])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_branch_is_its_chain(dtype: torch.dtype, start: int, window: int | None) -> None:
    """Bit for bit: each node as the last of a chain of the nodes above it."""
    tree = (0, 0, 1, 1, 2, 4, 6, 3, 8)
    parents = [-1, *tree]
    case = AttentionCase(len(parents), start, 4, 2, 24, 16, 24, window, tree)
    whole = Problem.of(case, dtype)
    # Nodes of one depth are turned alike.
    depths = torch.tensor([len(path_to(node, parents)) - 1 for node in range(case.rows)])
    cos, sin = whole.positions.cos[depths], whole.positions.sin[depths]
    whole.positions = Positions(start, cos, sin, case.parents)
    past = [cached.clone() for cached in whole.cached]
    attended = whole.run(window)
    for node in range(case.rows):
        path = path_to(node, parents)
        positions = Positions(start, cos[path], sin[path])
        rows = (whole.queries[path], whole.keys[path], whole.values[path])
        cached = (past[0].clone(), past[1].clone())
        alone = Problem(*rows, whole.heads, positions, cached).run(window)
        assert torch.equal(attended[node], alone[-1])
    # And as when its pass comes alone, behind those of the nodes before it.
    rows = (whole.queries, whole.keys, whole.values)
    singly = Problem(*rows, whole.heads, whole.positions, (past[0], past[1]))
    for node in range(case.rows):
        part = singly.part(node, node + 1)
        part.positions = Positions(
            start + node,
            cos[node : node + 1],
            sin[node : node + 1],
            torch.tensor(parents[: node + 1]),
        )
        assert torch.equal(attended[node], part.run(window)[0])


def test_what_is_no_number_stays_none() -> None:
    """Damaged weights are found by their logits, which must show it."""
    case = AttentionCase(2, 4, 2, 1, 16, 16, 0, None)
    problem = Problem.of(case, torch.float32)
    problem.queries[1, 3] = torch.nan
    attended = problem.run(None)
    assert attended[0].isfinite().all()
    assert attended[1, :16].isnan().all()
    norm = RMSNorm(torch.ones(16), 1e-6)
    rows = torch.ones(2, 16)
    rows[1, 3] = torch.nan
    normed = decoder_ops.rms_norm(rows, norm)
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()


# Of 24 experts.
BIAS, FACTORS = normal(24, seed=8) / 8, normal(24, seed=9)
RULES = (
    RouterRule(),
    RouterRule(divided=True),
    RouterRule(divided=True, factors=FACTORS),
    RouterRule(sigmoid=True, divided=True, bias=BIAS, added=1e-6, scale=1.5, rounded=True),
    RouterRule(scale=16.0, groups=6, kept_groups=2),
    RouterRule(True, True, 2.5, BIAS, 1e-20, groups=6, kept_groups=3, group_best=2),
)


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", range(len(RULES)))
def test_routes_are_torchs(at: int, dtype: torch.dtype, top_k: int) -> None:
    """Equal chances are common in 16 bits: they are told apart as torch does it."""
    assert_routes_are_torchs(RULES[at], (normal(40, 24) * 4).round().to(dtype) / 4, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (6, 2), (8, 8), (64, 6), (300, 4)])
def test_routes_among_few_and_many(
    experts: int, top_k: int, divided: bool, dtype: torch.dtype
) -> None:
    logits = (normal(40, experts) * 4).round().to(dtype) / 4
    assert_routes_are_torchs(RouterRule(divided=divided), logits, top_k)


def assert_routes_are_torchs(rule: RouterRule, logits: Tensor, top_k: int) -> None:
    weights = torch.empty(len(logits), top_k, dtype=logits.dtype)
    ids = torch.empty(len(logits), top_k, dtype=torch.int64)
    reference_decoder.route_out(
        logits, rule.bias, rule.factors, rule.sigmoid, rule.rounded, rule.divided,
        rule.groups, rule.kept_groups, rule.group_best, rule.added, rule.scale, weights, ids,
    )  # fmt: skip
    our_weights, our_ids = decoder_ops.route(logits, top_k, rule, logits.dtype)
    assert torch.equal(our_ids, ids)
    assert_close(our_weights, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotary"), [(2, 2), (33, 10), (64, 64)])
def test_rotation_is_transformers(
    width: int, rotary: int, interleaved: bool, dtype: torch.dtype
) -> None:
    rows, angles = normal(5, 3 * width, dtype=dtype), normal(5, rotary // 2, seed=1)
    turns = angles if interleaved else angles.repeat(1, 2).to(dtype)
    wanted = rows.clone()
    reference_decoder.rotate_out(wanted, width, turns.cos(), turns.sin(), interleaved)
    decoder_ops.rotate(rows, width, Positions(0, turns.cos(), turns.sin()), interleaved)
    assert_close(rows, wanted)
    assert rotary == width or torch.equal(
        rows.view(15, width)[:, rotary:], wanted.view(15, width)[:, rotary:]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_experts_are_added_up_in_order(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    outputs = normal(3, 5, 33, dtype=dtype)
    weights = normal(3, 5, dtype=weights_dtype, seed=1)
    wanted = torch.zeros(3, 33)
    for place in range(5):
        wanted += outputs[:, place].float() * weights[:, place, None].float()
    assert_close(decoder_ops.combine(outputs, weights, dtype), wanted.to(dtype))


def test_doubles_are_torchs() -> None:
    outputs, weights = normal(2, 3, 4).double(), normal(2, 3).double()
    ours = decoder_ops.combine(outputs, weights, torch.float64)
    assert torch.equal(ours, (outputs * weights[..., None]).sum(1))
    assert not decoder_ops.takes(outputs)
