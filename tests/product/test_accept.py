"""Acceptance: greedy against an exhaustive walk, drawn tokens against the target distribution."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from speq.config import SamplingParams
from speq.engine.accept import accept, walk
from speq.engine.draft import Draft, Outcome
from speq.engine.request import Request
from speq.engine.sampling import choose
from tests.reference.noise import noise

V = 12
DRAWS = 10_000
START = 0  # the pending token of every simulated text
RIGHT = 1e-3
WRONG = 1e-10

# Proposes a draft behind the last token of a text.
Proposer = Callable[[Request], Draft]


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
        outcome = walk(draft, chosen.__getitem__)
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
    request = Request([1], SamplingParams(temperature=0.0))
    assert accept(draft, logits, request) == Outcome([0, 1, 3], [3, 7, 9])


def rows(seed: int, spread: float) -> Tensor:
    """A random distribution after each token: [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(spread * torch.randn(V, V, generator=generator), dim=-1)


TARGET = rows(1, 1.0)
DRAFT = rows(2, 1.0)


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


def drawn_chain(table: Tensor, length: int) -> Proposer:
    """Chains that a drafter draws with the noise of the text."""

    def propose(text: Request) -> Draft:
        tokens = [text.pending_id]
        for _ in range(length):
            tokens.append(choose(table[tokens[-1]].log(), text, tokens[1:]))
        return Draft(tokens[1:], list(range(length)))

    return propose


def foreign_chain(length: int) -> Proposer:
    """Chains that know nothing of the noise."""
    rng = random.Random(3)
    return lambda text: Draft([rng.randrange(V) for _ in range(length)], list(range(length)))


def foreign_tree(nodes: int) -> Proposer:
    rng = random.Random(4)
    return lambda text: random_tree(rng, nodes)


def likeliest(text: Request) -> Draft:
    """The draft's three likeliest tokens side by side."""
    return Draft(DRAFT[text.pending_id].topk(3).indices.tolist(), [0, 0, 0])


def no_draft(text: Request) -> Draft:
    return Draft()


PROPOSERS = [
    pytest.param(drawn_chain(DRAFT, 3), id="drawn-chain"),
    pytest.param(drawn_chain(TARGET, 3), id="perfect-chain"),
    pytest.param(foreign_chain(2), id="foreign-chain"),
    pytest.param(foreign_tree(5), id="tree"),
    pytest.param(likeliest, id="siblings"),
]


def written(propose: Proposer, sampling: SamplingParams) -> tuple[list[int], list[Outcome]]:
    """A whole text behind START, and what became of each draft."""
    text, outcomes = Request([START], sampling), []
    while text.finish_reason is None:
        draft = propose(text)
        logits = TARGET[[text.pending_id, *draft.token_ids]].log()
        outcomes.append(accept(draft, logits, text))
        text.extend(outcomes[-1].token_ids)
    return text.output_token_ids, outcomes


def walked(sampling: SamplingParams, seed: int) -> list[int]:
    """The text that an exact model would write alone, by numpy and a rule of its own: the largest
    log-probability with Gumbel noise. Penalties are counted token by token.
    """
    tokens = [START]
    for position in range(sampling.max_new_tokens):
        logits = TARGET[tokens[-1]].double().log().numpy()
        for token in range(V):
            if token in tokens:
                penalty = sampling.repetition_penalty
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            if times := tokens[1:].count(token):
                logits[token] -= sampling.presence_penalty + times * sampling.frequency_penalty
        if not sampling.greedy:
            gumbel = -np.log(noise(seed, position, V).astype(np.float64))
            logits = logits / sampling.temperature + gumbel
        tokens.append(int(logits.argmax()))
    return tokens[1:]


@pytest.mark.parametrize("propose", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_drafts_change_no_token(propose: Proposer, temperature: float) -> None:
    accepted = 0
    for seed in (0, 1, 2**63 - 1):
        sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=seed)
        tokens, outcomes = written(propose, sampling)
        assert tokens == walked(sampling, seed)
        accepted += sum(outcome.accepted for outcome in outcomes)
    assert accepted > 0


@pytest.mark.parametrize("propose", [*PROPOSERS, pytest.param(no_draft, id="none")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.1, "presence_penalty": -0.2, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_drafts_change_no_penalised_token(
    propose: Proposer, temperature: float, penalties: dict[str, float]
) -> None:
    """Tokens that a draft proposes count among those before a position, on its path alone."""
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, seed=5, **penalties)
    tokens, _ = written(propose, sampling)
    assert tokens == walked(sampling, 5)
    assert tokens != walked(SamplingParams(max_new_tokens=40, temperature=temperature), 5)


# Thousands of texts: one proposer in all tests, the others in the wider checks.
STATISTICS = [
    pytest.param(*each.values, id=each.id, marks=[] if each.id == "tree" else pytest.mark.full)
    for each in (*PROPOSERS, pytest.param(no_draft, id="none"))
]


@pytest.mark.parametrize("propose", STATISTICS)
def test_drawn_tokens_follow_the_target(propose: Proposer) -> None:
    """Pairs of tokens over many seeds: the first by its distribution, the second by its own."""
    counts = np.zeros((V, V), dtype=int)
    for seed in range(DRAWS):
        sampling = SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed)
        first, second = written(propose, sampling)[0]
        counts[first, second] += 1
    assert p_value(counts.sum(1), FIRST) > RIGHT
    assert p_value(counts, JOINT) > RIGHT


def test_chi_square_catches_noise_that_repeats() -> None:
    """Were the second token drawn by the first one's noise, pairs would not be independent."""
    counts = np.zeros((V, V), dtype=int)
    for seed in range(DRAWS):
        text = Request([START], SamplingParams(temperature=1.0, seed=seed))
        first = choose(TARGET[START].log(), text, [])
        counts[first, choose(TARGET[first].log(), text, [])] += 1
    assert p_value(counts.sum(1), FIRST) > RIGHT
    assert p_value(counts, JOINT) < WRONG


@pytest.mark.wide
def test_one_long_text_follows_the_target() -> None:
    """Over positions of one seed, as over seeds: tokens behind each token."""
    sampling = SamplingParams(max_new_tokens=DRAWS, temperature=1.0, seed=7)
    tokens, _ = written(drawn_chain(DRAFT, 2), sampling)
    counts = np.zeros((V, V), dtype=int)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    for token in range(V):
        assert counts[token].sum() > 150
        assert p_value(counts[token], TARGET[token].double().numpy()) > RIGHT


def test_request_options_shape_the_target() -> None:
    """A temperature of 1/2: the target is the square of what the logits say."""
    wanted = TARGET[START].double() ** 2
    counts = np.zeros(V, dtype=int)
    for seed in range(DRAWS // 4):
        sampling = SamplingParams(max_new_tokens=1, temperature=0.5, seed=seed)
        counts[written(likeliest, sampling)[0][0]] += 1
    assert p_value(counts, wanted.numpy()) > RIGHT
    assert p_value(counts, FIRST) < WRONG


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    ],
    ids=str,
)
def test_a_draft_that_equals_the_target_stands_whole(options: dict[str, float]) -> None:
    sampling = SamplingParams(max_new_tokens=400, seed=7, **options)
    _, outcomes = written(drawn_chain(TARGET, 3), sampling)
    assert [outcome.path for outcome in outcomes] == [[0, 1, 2, 3]] * 100


@pytest.mark.full
def test_shared_noise_lets_most_of_what_is_alike_stand() -> None:
    """Of distributions that differ in a share d, from (1 - d) / (1 + d) to 1 - d (arXiv:2408.07978,
    Theorem 1); five standard deviations of luck are granted.
    """
    for spread in (0.05, 0.3, 1.0):
        generator = torch.Generator().manual_seed(9)
        other = torch.softmax(TARGET.log() + spread * torch.randn(V, V, generator=generator), -1)
        stands, at_least, at_most = 0, 0.0, 0.0
        for seed in range(DRAWS):
            text = Request([START], SamplingParams(temperature=1.0, seed=seed))
            row = seed % V
            ours, theirs = (choose(t[row].log(), text, [row]) for t in (TARGET, other))
            stands += ours == theirs
            differing = (TARGET[row] - other[row]).abs().sum().item() / 2
            at_least += (1 - differing) / (1 + differing)
            at_most += 1 - differing
        luck = 5 * (DRAWS / 4) ** 0.5
        assert at_least - luck < stands < at_most + luck


def test_disjoint_support_accepts_nothing() -> None:
    even = torch.arange(V) % 2 == 0
    odd_tokens = (DRAFT * ~even) / (DRAFT * ~even).sum(-1, keepdim=True)
    text = Request([START], SamplingParams(temperature=1.0, seed=8))
    while text.remaining > 2:
        draft = drawn_chain(odd_tokens, 2)(text)
        outcome = accept(draft, TARGET[[0, 1, 2]].log().masked_fill(~even, -torch.inf), text)
        assert outcome.path == [0]
        assert even[outcome.token_ids].all()
        text.extend(outcome.token_ids)


def test_equal_seeds_give_equal_texts() -> None:
    texts = [
        written(no_draft, SamplingParams(max_new_tokens=50, temperature=1.0, seed=seed))[0]
        for seed in (1, 1, 2, None, None)
    ]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 4
