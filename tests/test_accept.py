"""Acceptance: greedy against an exhaustive walk, sampled against the target distribution."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from speq.accept import accept, accept_greedy, accept_sampled
from speq.config import SamplingParams
from speq.sequence import Draft, Outcome, Sequence

V = 12
DRAWS = 20_000
START = 0  # the pending token of every simulated text
RIGHT = 1e-3
WRONG = 1e-10

# Proposes a draft behind a token; and turns a draft, the target's rows and randomness into tokens.
Proposer = Callable[[int], Draft]
Rule = Callable[[Draft, Tensor, torch.Generator], list[int]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many thousands of tiny operations: threads would do nothing but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_tree(rng: random.Random, nodes: int) -> Draft:
    """A tree with `nodes` proposals, siblings all different."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < nodes:
        parent, token = rng.randint(0, len(tokens)), rng.randrange(4)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return Draft(tokens, parents)


def longest_agreed(draft: Draft, chosen: list[int]) -> list[int]:
    """The deepest node whose every ancestor was chosen, found by looking at all nodes."""
    best = [0]
    for node in range(1, draft.nodes):
        path = [node]
        while path[0] != 0:
            path.insert(0, draft.parents[path[0] - 1])
        agreed = all(draft.token_ids[below - 1] == chosen[above] for above, below in pairwise(path))
        if agreed and len(path) > len(best):
            best = path
    return best


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_greedy_follows_the_agreed_path(shape: str) -> None:
    rng = random.Random(1)
    lengths = set()
    for _ in range(400):
        nodes = rng.randint(0, 9)
        draft = random_tree(rng, nodes)
        if shape == "chain":
            draft = Draft([rng.randrange(2) for _ in range(nodes)], list(range(nodes)))
        chosen = [rng.randrange(2 if shape == "chain" else 4) for _ in range(nodes + 1)]
        outcome = accept_greedy(draft, chosen)
        path = longest_agreed(draft, chosen)
        assert outcome.path == path
        tokens = [draft.token_ids[node - 1] for node in path[1:]]
        assert outcome.token_ids == [*tokens, chosen[path[-1]]]
        assert outcome.accepted == len(tokens)
        lengths.add(outcome.accepted)
    assert {0, 1, 2, 3} <= lengths


def test_greedy_request_takes_the_likeliest_tokens() -> None:
    draft = Draft([3, 5, 7], [0, 1, 1])
    logits = torch.full((4, V), -1.0)
    for node, token in enumerate([3, 7, 2, 9]):
        logits[node, token] = 1.0
    sequence = Sequence([1], SamplingParams(temperature=0.0))
    assert accept(draft, logits, sequence) == Outcome([0, 1, 3], [3, 7, 9])


def rows(seed: int, spread: float) -> Tensor:
    """A random distribution after each token: [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(spread * torch.randn(V, V, generator=generator), dim=-1)


TARGET = rows(1, 1.0)
DRAFT = rows(2, 1.0)
TABLES = {"target": TARGET, "draft": DRAFT}


@cache
def rows_of(table: str, tokens: tuple[int, ...]) -> Tensor:
    """The rows of some tokens in the target's or the draft's table."""
    return TABLES[table][list(tokens)]


def draws(table: Tensor, seed: int) -> Callable[[int], int]:
    """Independent draws from the row of a token, made a few thousand at a time."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Iterator[int]] = {}

    def draw(token: int) -> int:
        drawn = next(made.get(token, iter(())), None)
        while drawn is None:
            batch = torch.multinomial(table[token], 4096, replacement=True, generator=generator)
            made[token] = iter(batch.tolist())
            drawn = next(made[token])
        return drawn

    return draw


def sampled_chain(table: str, length: int) -> Proposer:
    """Chains of tokens drawn one after the other."""
    draw = draws(TABLES[table], seed=3)

    def propose(token: int) -> Draft:
        tokens = [token]
        for _ in range(length):
            tokens.append(draw(tokens[-1]))
        return Draft(tokens[1:], list(range(length)), rows_of(table, tuple(tokens[:-1])))

    return propose


def sampled_tree(table: str, depth: int) -> Proposer:
    """Two independent draws behind every node, `depth` levels of them."""
    draw = draws(TABLES[table], seed=4)

    def propose(token: int) -> Draft:
        tokens, parents, level = [token], [], [0]
        for _ in range(depth):
            below = []
            for parent in level:
                for _ in range(2):
                    below.append(len(tokens))
                    tokens.append(draw(tokens[parent]))
                    parents.append(parent)
            level = below
        above = tuple(tokens[parent] for parent in parents)
        return Draft(tokens[1:], parents, rows_of(table, above))

    return propose


@cache
def certain_chain(token: int) -> Draft:
    """The draft's likeliest tokens, without probabilities."""
    first = int(DRAFT[token].argmax())
    return Draft([first, int(DRAFT[first].argmax())], [0, 1])


@cache
def certain_tree(token: int) -> Draft:
    """The draft's three likeliest tokens side by side, without probabilities."""
    return Draft(DRAFT[token].topk(3).indices.tolist(), [0, 0, 0])


def by_the_rule(draft: Draft, target: Tensor, rng: torch.Generator) -> list[int]:
    return accept_sampled(draft, target, rng).token_ids


def emitted(propose: Proposer, rule: Rule = by_the_rule, length: int = 2) -> np.ndarray:
    """How often each sequence of `length` tokens came behind the pending one: [V, ...]."""
    rng = torch.Generator().manual_seed(5)
    counts = np.zeros((V,) * length, dtype=int)
    for _ in range(DRAWS):
        tokens = [START]
        while len(tokens) <= length:
            draft = propose(tokens[-1])
            tokens += rule(draft, rows_of("target", (tokens[-1], *draft.token_ids)), rng)
        counts[tuple(tokens[1 : 1 + length])] += 1
    return counts


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of the chi-square test that `counts` were drawn from `probs`; rare cells are put together."""
    expected = probs.ravel() / probs.sum() * counts.sum()
    observed = counts.ravel()
    if observed[expected == 0].any():
        return 0.0
    possible = expected > 0
    observed, expected = observed[possible], expected[possible]
    rare = expected < 5
    groups = [
        np.append(part[~rare], part[rare].sum()) if rare.any() else part[~rare]
        for part in (observed, expected)
    ]
    return float(stats.chisquare(*groups).pvalue)


FIRST = TARGET[START].double().numpy()
JOINT = FIRST[:, None] * TARGET.double().numpy()


@pytest.mark.parametrize(
    ("propose", "length"),
    [
        pytest.param(sampled_chain("draft", 2), 2, id="chain"),
        pytest.param(sampled_tree("draft", 1), 2, id="siblings"),
        pytest.param(sampled_tree("draft", 2), 2, id="tree"),
        pytest.param(certain_chain, 2, id="certain-chain"),
        pytest.param(certain_tree, 1, id="certain-tree"),
        pytest.param(lambda token: Draft(), 1, id="no-draft"),
    ],
)
def test_emitted_tokens_follow_the_target(propose: Proposer, length: int) -> None:
    counts = emitted(propose, length=length)
    assert p_value(counts.reshape(V, -1).sum(1), FIRST) > RIGHT
    assert p_value(counts, JOINT if length == 2 else FIRST) > RIGHT


def test_request_options_shape_the_target() -> None:
    """Through `accept`, with logits and a temperature: the target is a power of theirs."""
    temperature = 0.5
    wanted = TARGET[START].double() ** (1 / temperature)
    sequence = Sequence([1], SamplingParams(temperature=temperature, seed=6))
    propose = sampled_chain("draft", 1)
    counts = np.zeros(V, dtype=int)
    logits = TARGET.log()
    for _ in range(DRAWS // 4):
        draft = propose(START)
        outcome = accept(draft, logits[[START, *draft.token_ids]], sequence)
        counts[outcome.token_ids[0]] += 1
    assert p_value(counts, wanted.numpy()) > RIGHT
    assert p_value(counts, FIRST) < WRONG


def test_draft_that_equals_the_target_is_accepted_whole() -> None:
    rng = torch.Generator().manual_seed(7)
    propose = sampled_chain("target", 3)
    for _ in range(2000):
        draft = propose(START)
        outcome = accept_sampled(draft, rows_of("target", (START, *draft.token_ids)), rng)
        assert outcome.path == [0, 1, 2, 3]
        assert outcome.token_ids[:3] == draft.token_ids


def test_disjoint_support_accepts_nothing() -> None:
    even = torch.arange(V) % 2 == 0
    target = (TARGET[START] * even) / (TARGET[START] * even).sum()
    proposal = (DRAFT[START] * ~even) / (DRAFT[START] * ~even).sum()
    rng = torch.Generator().manual_seed(8)
    draw = draws(proposal[None], seed=9)
    targets, proposals = target.expand(3, V), proposal.expand(2, V)
    counts = np.zeros(V, dtype=int)
    for _ in range(DRAWS):
        outcome = accept_sampled(Draft([draw(0), draw(0)], [0, 0], proposals), targets, rng)
        assert outcome.path == [0]
        assert len(outcome.token_ids) == 1
        counts[outcome.token_ids[0]] += 1
    assert p_value(counts, target.double().numpy()) > RIGHT


def wrong_rule(odds: Callable[[float, float], float], left: str) -> Rule:
    """A rule like the right one but for the odds, or for what is left after a rejection."""

    def rule(draft: Draft, target: Tensor, rng: torch.Generator) -> list[int]:
        rest = target[0]
        for token, proposal in zip(draft.token_ids, draft.probs, strict=True):
            bound = odds(rest[token].item(), proposal[token].item())
            if torch.rand((), generator=rng).item() < bound:
                return [token]
            if left == "residual":
                rest = (rest - proposal).clamp(min=0)
                rest = rest / rest.sum()
        if left == "residual at the end":
            rest = (rest - draft.probs[0]).clamp(min=0)
        return [int(torch.multinomial(rest, 1, generator=rng))]

    return rule


@pytest.mark.parametrize(
    ("propose", "rule"),
    [
        pytest.param(
            sampled_chain("draft", 1),
            wrong_rule(lambda p, q: q / p, "residual"),
            id="odds-inverted",
        ),
        pytest.param(
            sampled_chain("draft", 1), wrong_rule(lambda p, q: p / q, "target"), id="no-residual"
        ),
        pytest.param(
            sampled_chain("draft", 1), wrong_rule(lambda p, q: p, "residual"), id="odds-not-divided"
        ),
        pytest.param(
            sampled_chain("draft", 1),
            wrong_rule(lambda p, q: 1.0, "residual"),
            id="always-accepted",
        ),
        pytest.param(
            sampled_tree("draft", 1),
            wrong_rule(lambda p, q: p / q, "residual at the end"),
            id="siblings-judged-by-the-whole-target",
        ),
    ],
)
def test_chi_square_catches_wrong_rules(propose: Proposer, rule: Rule) -> None:
    assert p_value(emitted(propose, rule, length=1), FIRST) < WRONG


def test_wrong_rules_differ_from_a_right_one_of_the_same_form() -> None:
    """The form the wrong rules take is able to pass: only what is wrong in them is caught."""
    right = wrong_rule(lambda p, q: p / q, "residual")
    assert p_value(emitted(sampled_tree("draft", 1), right, length=1), FIRST) > RIGHT


def test_equal_seeds_give_equal_tokens() -> None:
    draft = sampled_chain("draft", 2)(START)
    logits = TARGET[[START, *draft.token_ids]].log()
    outcomes = [
        [accept(draft, logits, sequence).token_ids for _ in range(50)]
        for sequence in (
            Sequence([1], SamplingParams(temperature=1.0, seed=seed)) for seed in (1, 1, 2)
        )
    ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]
