"""Drafts that are trees: verified in one pass, each path as if it stood alone."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq import Generator
from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest
from speq.engine.request import Request
from speq.measure.probe import verify
from speq.models.kv_cache import KVLayer
from tests.helpers.often import often
from tests.helpers.random_rows import RandomRows
from tests.helpers.tiny_models import BY_FAMILY, drawn_tokens, greedy_tokens, load_plain

PROMPT = [*range(30, 75)]  # longer than the smallest sliding window
# Node 0 is the pending token: two children, one of which has two children of its own, and so on.
PARENTS = [0, 0, 1, 1, 2, 4, 6]


def path_to(node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path = [node]
    while path[0]:
        path.insert(0, PARENTS[path[0] - 1])
    return path


@pytest.mark.parametrize("family", BY_FAMILY)
def test_every_path_scores_as_if_alone(family: str, tiny: Callable[[str], Path]) -> None:
    plain = load_plain(tiny(family))
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft="none", context_length=96)
    engine = generator.runtime.engine
    request = Request(PROMPT, SamplingParams(max_new_tokens=40))
    engine.prefill(request)
    draft = Draft([11, 22, 33, 44, 55, 66, 77], PARENTS)
    scored = verify(engine, request.pending_id, draft)
    tokens = [request.pending_id, *draft.token_ids]
    for node in range(draft.nodes):
        alone = PROMPT + [tokens[at] for at in path_to(node)]
        with torch.no_grad():
            expected = plain(torch.tensor([alone]), output_hidden_states=True)
        torch.testing.assert_close(
            scored.logits[node], expected.logits[0, -1], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            scored.features[node], expected.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("family", BY_FAMILY)
def test_the_cache_holds_exact_entries_only(family: str, tiny: Callable[[str], Path]) -> None:
    """After rounds of drafting and rejecting, as if the tokens had been a prompt."""
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft_length=3, context_length=96)
    result = generator.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert 0 < result.stats["acceptance_rate"] < 1
    cache = generator.runtime.engine.caches[0]
    with_entries = [layer for layer in cache.layers if isinstance(layer, KVLayer)]
    kept = [[each.clone() for each in layer.tensors] for layer in with_entries]
    length = cache.length
    assert length == len(PROMPT) + 39
    generator.generate(PROMPT + result.token_ids[:39], max_new_tokens=1, ignore_eos=True)
    # Norms behind attention and experts, or wide ones before them, enlarge what passes of other
    # shapes differ by.
    states = ("granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid")
    far = family in ("gemma4", *states)
    close = {"rtol": 1e-4, "atol": 5e-5} if far else {}
    for tensors, layer in zip(kept, with_entries, strict=True):
        for ours, theirs in zip(tensors, layer.tensors, strict=True):
            torch.testing.assert_close(ours[:, :, :length], theirs[:, :, :length], **close)


class BranchingDrafter:
    """Knows the answer, and hides it among wrong branches: sometimes first, sometimes second."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.proposed = 0

    def propose(self, asked: DraftRequest) -> Draft:
        at = len(asked.request.output_token_ids)
        token_ids: list[int] = []
        parents: list[int] = []
        trunk = 0
        for depth, right in enumerate(self.answer[at : at + asked.limits.length]):
            # Wrong siblings, right ones, and from time to time none that is right.
            wrong = (right + 1) % 256
            pair = [wrong, right] if (at + depth) % 3 else [right, wrong]
            if (at + depth) % 7 == 6:
                pair = [wrong, (right + 2) % 256]
            parents += [trunk, trunk]
            token_ids += pair
            trunk = len(token_ids) - 1 + pair.index(right) if right in pair else len(token_ids)
        self.proposed += len(token_ids)
        return Draft(token_ids, parents)


@pytest.mark.parametrize("family", BY_FAMILY)
def test_the_accepted_path_is_kept(family: str, tiny: Callable[[str], Path]) -> None:
    count = 120
    expected = greedy_tokens(load_plain(tiny(family)), PROMPT, count)
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft_length=4)
    generator.reserve(len(PROMPT) + count + 16)
    drafter = BranchingDrafter(expected)
    generator.runtime.engine.drafters[0] = drafter
    result = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
    assert result.token_ids == expected
    steps = generator.last_run.decode
    assert drafter.proposed > count
    accepted = {step.accepted for step in steps}
    assert {0, 4} < accepted


Shape = Callable[[random.Random, int], list[int]]


def comb(rng: random.Random, nodes: int) -> list[int]:
    """A chain with a leaf at each of its nodes."""
    return [max(at - 1 - at % 2, 0) for at in range(nodes)]


SHAPES: dict[str, Shape] = {
    "chain": lambda rng, nodes: [*range(nodes)],
    "star": lambda rng, nodes: [0] * nodes,
    "binary": lambda rng, nodes: [at // 2 for at in range(nodes)],
    "comb": comb,
    "any": lambda rng, nodes: [rng.randint(0, at) for at in range(nodes)],
    "deep": lambda rng, nodes: [rng.randint(max(at - 3, 0), at) for at in range(nodes)],
}


class ShapedDrafter:
    """Knows the answer, and puts it here and there into trees of one shape after another."""

    def __init__(self, answer: list[int], seed: int) -> None:
        self.answer = answer
        self.most_rows = 0
        self._rng = random.Random(seed)
        self._turn = 0

    def propose(self, asked: DraftRequest) -> Draft:
        assert asked.limits.nodes is not None
        shape = [*SHAPES.values()][self._turn % len(SHAPES)]
        self._turn += 1
        # Up to what there is room for, and beyond what is still to be generated.
        parents = shape(self._rng, self._rng.randint(1, asked.limits.nodes))
        draft = Draft([0] * len(parents), parents)
        at, depths = len(asked.request.output_token_ids), draft.tree.depths()
        right = {0}
        for node, parent in enumerate(parents, start=1):
            place = at + depths[node] - 1
            answer = self.answer[place] if place < len(self.answer) else 7
            if parent in right and self._rng.random() < 0.6:
                right.add(node)
                draft.token_ids[node - 1] = answer
            else:
                draft.token_ids[node - 1] = (answer + 1 + node) % 256
        self.most_rows = max(self.most_rows, draft.nodes)
        return draft


@pytest.mark.parametrize("pruned", often([True, False], quick=1, wide=1), ids=["pruned", "whole"])
@pytest.mark.parametrize("family", BY_FAMILY)
def test_trees_of_every_shape_give_the_exact_tokens(
    family: str, pruned: bool, tiny: Callable[[str], Path]
) -> None:
    """Greedy and drawn, up to as many rows as the cache has room for."""
    count, nodes = 50, 63
    plain = load_plain(tiny(family))
    drawn = SamplingParams(temperature=0.9, top_k=50, seed=11)
    texts = (
        (greedy_tokens(plain, PROMPT, count), {}),
        (drawn_tokens(plain, PROMPT, count, drawn), {"temperature": 0.9, "top_k": 50, "seed": 11}),
    )
    generator = Generator.from_pretrained(
        tiny(family),
        "1GiB",
        draft_length=4,
        draft_nodes=nodes,
        context_length=len(PROMPT) + count + 20,
    )
    engine = generator.runtime.reserve(len(PROMPT) + count)
    rows = RandomRows(seed=6) if pruned else None
    engine.offload.rows.policy = rows
    for expected, sampling in texts:
        engine.drafters[0] = drafter = ShapedDrafter(expected, seed=len(family))
        result = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True, **sampling)
        assert result.token_ids == expected
        steps = generator.last_run.decode
        assert drafter.most_rows > 16
        assert {step.accepted > 0 for step in steps} == {True, False}
        assert any(step.given_up for step in steps) == pruned
        assert sum(step.given_up for step in steps) == (rows.died if rows else 0)
        if rows is not None:
            rows.died = 0
    generator.close()


def test_a_dead_row_asks_for_no_expert(tiny: Callable[[str], Path]) -> None:
    """Every layer is asked for what live rows want, and for nothing else."""
    generator = Generator.from_pretrained(
        tiny("olmoe"), "1GiB", draft_length=4, draft_nodes=20, context_length=120
    )
    engine = generator.runtime.reserve(110)
    engine.offload.rows.policy = RandomRows(seed=2, chance=0.6)
    asked: dict[int, list[int]] = {}
    serve = engine.offload.prefetcher.serve

    def served(layer: int, experts: list[int]) -> object:
        asked[layer] = experts
        return serve(layer, experts)

    engine.offload.prefetcher.serve = served  # type: ignore[method-assign, assignment]
    request = Request(PROMPT, SamplingParams(max_new_tokens=60, ignore_eos=True))
    engine.prefill(request)
    fewer = 0
    while request.finish_reason is None:
        engine.step([request])
        for layer, route in engine.lookahead.used.items():
            wanted = {expert for row in route.rows for expert in route.ids[row]}
            assert asked[layer] == sorted(wanted)
            fewer += wanted != set(route.experts)
    assert fewer > 5
    generator.close()


def test_trees_have_room_beside_what_a_request_needs(tiny: Callable[[str], Path]) -> None:
    """As far as the context may be so long; at its end they are smaller."""
    needed, nodes = len(PROMPT) + 30, 40
    roomy = Generator.from_pretrained(tiny("olmoe"), "1GiB", draft_length=8, draft_nodes=nodes)
    roomy.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert roomy.runtime.plan.context >= needed + nodes
    assert roomy.runtime.longest_draft == nodes
    roomy.close()
    tight = Generator.from_pretrained(
        tiny("olmoe"), "1GiB", draft_length=8, draft_nodes=nodes, context_length=needed
    )
    tight.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    cache, kept = tight.runtime.engine.caches[0], len(PROMPT)
    assert cache.capacity == needed
    drafted = []
    for step in tight.last_run.decode:
        assert kept + step.rows <= needed
        drafted.append(step.rows - 1)
        kept += step.emitted
    assert max(drafted) > 8
    tight.close()
