"""What a head makes of a text that it hears in pieces, beside the whole text in one go."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftContext, DraftLimits, DraftRequest
from speq.engine.drafters.head import HeadDrafter
from speq.engine.request import Request
from speq.engine.sampler import HostSampler
from speq.governor.confidence import Confidence
from speq.heads import head_context
from speq.heads.head_context import HeadContext, path_slices
from speq.heads.head_shape import HeadShape
from speq.heads.moe_head import BranchState, MoEHead
from speq.models.kv_cache import KVCache
from speq.models.tree import Tree
from tests.helpers.heads import head_in_numpy, random_head
from tests.reference.noise import noise

HIDDEN, VOCAB = 16, 40


class Model:
    """As much of a model as a head asks for."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=self.dtype)

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.table[torch.tensor(token_ids)]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.table.T


@dataclass
class Whole:
    """The same text at once, in numpy: features of its tokens, and what a path of tokens makes."""

    model: Model
    head: MoEHead
    features: Tensor

    def states(self, token_ids: list[int]) -> dict[str, Any]:
        """Of the last position behind a text whose first tokens the features are of: `token_ids`
        goes on beyond them, and what the head says takes the place of what the model would.
        """
        features = self.features.clone()
        while True:
            embedded = self.model.embed(token_ids[1 : len(features) + 1])
            found = head_in_numpy(self.head, embedded.numpy(), features.numpy())
            if len(features) == len(token_ids) - 1:
                return {name: rows[-1] for name, rows in found.items()}
            features = torch.cat([features, torch.from_numpy(found["feature"][-1:])])


def same(state: BranchState, wanted: dict[str, Any]) -> None:
    found = {name: getattr(state, name) for name in wanted}
    for name, rows in found.items():
        assert rows.shape[0] == 1
        close = torch.from_numpy(wanted[name])
        torch.testing.assert_close(rows[0].double(), close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [4, 200])
@pytest.mark.parametrize("waiting", [3, 64])
def test_pieces_make_the_whole(window: int, waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, then rounds: a chain, a tree, what was accepted, and so on."""
    monkeypatch.setattr(head_context, "WAITING", waiting)
    rng, model = random.Random(window + waiting), Model()
    head = random_head(HeadShape(HIDDEN, 12, window=window)).double()
    text = HeadContext(model, head.load(model.dtype, model.device), 200)  # type: ignore[arg-type]
    for length in (1, 17):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        features = torch.randn(100, HIDDEN, dtype=model.dtype)
        text.reset()
        at = 0
        while at < length:
            count = rng.randint(1, 9)
            text.observe_verified(
                tokens[at : min(at + count, length)], features[at : min(at + count, length)]
            )
            at = min(at + count, length)
        for _ in range(4):
            assert text.verified_count == len(tokens)
            tokens.append(rng.randrange(VOCAB))  # the pending one
            if rng.random() < 0.7:  # else a round without a draft
                whole = Whole(model, head, features[: len(tokens) - 1])
                state = text.root(tokens[-1])
                same(state, whole.states(tokens))
                root = text.cache.length
                assert root == len(tokens) - 1
                draft_chain(text, whole, tokens, state, rng)
                text.forget(root)
                draft_tree(text, whole, tokens, state, rng)
                text.forget(root)
            accepted = [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
            start = len(tokens) - 1
            tokens += accepted
            text.observe_verified(tokens[start:], features[start : len(tokens)])


@pytest.mark.parametrize("heard", [12, 20, 90])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_text_begins_as_another_did(heard: int, elsewhere: bool) -> None:
    """Their first 12 tokens are alike, and their 11 first entries: whether these were made or not,
    behind drafts of the other text.
    """
    rng, model = random.Random(heard), Model()
    head = random_head(HeadShape(HIDDEN, 12)).double()
    held = head.load(model.dtype, model.device)
    before = HeadContext(model, held, 200)  # type: ignore[arg-type]
    features = torch.randn(heard, HIDDEN, dtype=model.dtype)
    tokens = [rng.randrange(VOCAB) for _ in range(heard)]
    before.observe_verified(tokens, features)
    if heard == 20:
        before.node(5, before.root(4).feature)
        before.forget(heard)
    following = [*tokens[:12], *[(tokens[12 % heard] + 1) % VOCAB] * 9]
    assert before.common_prefix_length(following) == 11
    assert before.common_prefix_length([]) == before.common_prefix_length(following[1:]) == 0
    text = HeadContext(model, held, 200) if elsewhere else before  # type: ignore[arg-type]
    text.reset(11, before)
    others = torch.cat([features[:11], torch.randn(10, HIDDEN, dtype=model.dtype)])
    text.observe_verified(following[11:], others[11:])
    assert text.verified_count == len(following)
    same(text.root(3), Whole(model, head, others).states([*following, 3]))
    assert text.common_prefix_length([*following, 3]) == len(following) - 1
    if elsewhere:  # which goes on as it was
        same(before.root(6), Whole(model, head, features).states([*tokens, 6]))


def draft_chain(
    text: HeadContext, whole: Whole, tokens: list[int], state: BranchState, rng: random.Random
) -> None:
    drafted: list[int] = []
    for _ in range(2):
        drafted.append(rng.randrange(VOCAB))
        state = text.node(drafted[-1], state.feature)
        same(state, whole.states(tokens + drafted))


def draft_tree(
    text: HeadContext, whole: Whole, tokens: list[int], state: BranchState, rng: random.Random
) -> None:
    draft, states = Draft(), {0: state}
    for node in range(1, 6):
        parent = rng.randrange(node)
        draft.token_ids.append(rng.randrange(VOCAB))
        draft.parents.append(parent)
        tree = Tree.of(draft.parents, rows=1)
        states[node] = text.node(draft.token_ids[-1], states[parent].feature, tree)
        same(states[node], whole.states(tokens + draft.above(node)))


def test_entries_that_a_node_sees() -> None:
    tree = Tree.of([0, 0, 2, 1])  # 4 lies behind 1, whose entry is at 11
    assert path_slices(tree, 14, 100) == [slice(0, 12), slice(14, 15)]
    assert path_slices(tree, 14, 5) == [slice(8, 12), slice(14, 15)]
    assert path_slices(tree, 14, 3) == [slice(10, 12), slice(14, 15)]
    assert path_slices(tree, 14, 2) == [slice(11, 12), slice(14, 15)]
    assert path_slices(tree, 4, 100) == [slice(0, 2), slice(4, 5)]


# What the drafter makes of it: the best tokens of every node, by their definition.


def drafter(head: MoEHead, model: Model) -> HeadDrafter:
    shape = ((1, 2), (1, 2))
    cache = KVCache(1, shape, 200, model.dtype, model.device)
    held = head.load(model.dtype, model.device)
    return HeadDrafter(DraftContext(model, cache, None, HostSampler(), head=held))  # type: ignore[arg-type]


def told(text: Request, features: Tensor, of: HeadDrafter) -> None:
    of.reset(0, of)
    of.observe_verified(text.prompt_token_ids, features)


def likeliest(
    whole: Whole, tokens: list[int], sampling: SamplingParams, position: int, part: str = "next"
) -> int:
    """The token that noise picks out of what the head says behind tokens."""
    state = whole.states(tokens)
    if part == "next":
        logits = torch.from_numpy(state["branches"]) @ whole.model.table.T
        probs = (torch.from_numpy(state["mixing"])[:, None] * logits.softmax(-1)).sum(0)
    else:
        probs = (torch.from_numpy(state["after"]) @ whole.model.table.T).softmax(-1)
    if sampling.greedy:
        return int(probs.argmax())
    assert sampling.seed is not None
    tempered = probs ** (1 / sampling.temperature)
    ticks = (tempered / tempered.sum()).float() / torch.from_numpy(
        noise(sampling.seed, position, VOCAB)
    )
    return int(ticks.argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("contrast", [True, False])
def test_chains_are_the_likeliest_tokens(temperature: float, contrast: bool) -> None:
    """By the mixture at every step; the last of a chain by the contrast, without a pass."""
    model = Model()
    head = random_head(HeadShape(HIDDEN, 12, contrast=contrast), seed=2).double()
    sampling = SamplingParams(max_new_tokens=50, temperature=temperature, seed=5)
    prompt = [*range(12)]
    features = torch.randn(12, HIDDEN, dtype=model.dtype)
    whole = Whole(model, head, features)
    for length in (1, 2, 4):
        text = Request(prompt, sampling, output_token_ids=[7])
        of = drafter(head, model)
        told(text, features, of)
        asked: list[int] = []

        def continue_draft(
            drafted: int, logit_margin: float | None, parent: int | None = None, asked: Any = asked
        ) -> bool:
            asked.append(drafted)
            return True

        draft = of.propose(DraftRequest(text, DraftLimits(length), lambda *_: None, continue_draft))
        wanted: list[int] = []
        by_contrast = contrast and length > 1
        for step in range(length - by_contrast):
            wanted.append(likeliest(whole, [*prompt, 7, *wanted], sampling, 1 + step))
        if by_contrast:
            at = [*prompt, 7, *wanted[:-1]]
            wanted.append(likeliest(whole, at, sampling, length, "after"))
        assert draft.token_ids == wanted
        assert draft.is_chain
        assert draft.passes == length - by_contrast
        assert len(asked) == length - 1
        assert [logit_margin is None for logit_margin in draft.logit_margins] == [
            False
        ] * draft.passes + [True] * by_contrast


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_hold_the_chain_and_more(temperature: float) -> None:
    model = Model()
    head = random_head(HeadShape(HIDDEN, 12), seed=4).double()
    sampling = SamplingParams(max_new_tokens=50, temperature=temperature, seed=5)
    prompt, features = [*range(12)], torch.randn(12, HIDDEN, dtype=model.dtype)
    whole = Whole(model, head, features)
    text = Request(prompt, sampling, output_token_ids=[7])
    of = drafter(head, model)
    told(text, features, of)
    draft = of.propose(DraftRequest(text, DraftLimits(5, 20), lambda *_: None, lambda *_: True))
    assert 8 < len(draft.token_ids) <= 20
    assert draft.passes == 4
    assert not draft.is_chain
    # The first child of a node that was run is the mixture's choice.
    for node in range(draft.passes):
        ahead = draft.above(node)
        first = likeliest(whole, [*prompt, 7, *ahead], sampling, 1 + len(ahead))
        children = [draft.token_ids[child - 1] for child in draft.children(node)]
        assert children[0] == first or not children
    # Nodes that only the contrast tells have no lead.
    beyond = [
        at for at, logit_margin in enumerate(draft.logit_margins, start=1) if logit_margin is None
    ]
    assert beyond
    for node in beyond:
        parent = draft.parents[node - 1]
        grandparent = draft.parents[parent - 1]
        ahead = draft.above(grandparent)
        at = [*prompt, 7, *ahead]
        wanted = likeliest(whole, at, sampling, 2 + len(ahead), "after")
        assert draft.token_ids[node - 1] == wanted


def test_drafts_end_where_the_text_does_and_where_they_are_told() -> None:
    model = Model()
    head = random_head(HeadShape(HIDDEN, 12), seed=2).double()
    sampling = SamplingParams(max_new_tokens=50)
    drawn = torch.Generator().manual_seed(0)
    prompt, features = [*range(12)], torch.randn(12, HIDDEN, generator=drawn, dtype=model.dtype)

    def propose(eos: frozenset[int], goes_on: bool, nodes: int | None = None) -> Draft:
        text = Request(prompt, sampling, eos, output_token_ids=[7])
        of = drafter(head, model)
        told(text, features, of)
        return of.propose(
            DraftRequest(text, DraftLimits(4, nodes), lambda *_: None, lambda *_: goes_on)
        )

    whole = propose(frozenset(), True).token_ids
    assert len(whole) == 4 and whole[0] != whole[1]
    assert propose(frozenset(), False).token_ids == whole[:1]
    assert propose(frozenset({whole[1]}), True).token_ids[:2] == whole[:2]
    assert len(propose(frozenset({whole[0]}), True).token_ids) == 1
    assert propose(frozenset(), False, nodes=9).passes == 1


def test_leads_of_a_head_are_taken_for_less() -> None:
    """Behind the choice by half a logit is no hopeless case."""
    base = Confidence()
    head = random_head(HeadShape(HIDDEN, 12), seed=2)
    cache = KVCache(1, ((1, 2), (1, 2)), 8, torch.float32, torch.device("cpu"))
    before = base.probability(-0.4)
    HeadDrafter(
        DraftContext(Model(), cache, None, HostSampler(), confidence=base, head=head)  # type: ignore[arg-type]
    )
    assert before < 0.05
    assert 0.3 < base.probability(-0.4) < 0.5
    assert base.probability(None) == pytest.approx(0.7)
