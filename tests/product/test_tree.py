"""Drafts that are trees: verified in one pass, each path as if it stood alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq import Generator
from speq.config import SamplingParams
from speq.decode.drafter import GoOn
from speq.decode.sequence import Draft, Sequence
from speq.layers.draft_experts import OnRoute
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain

PROMPT = [*range(30, 75)]  # longer than the smallest sliding window
# Node 0 is the pending token: two children, one of which has two children of its own, and so on.
PARENTS = [0, 0, 1, 1, 2, 4, 6]


def path_to(node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path = [node]
    while path[0]:
        path.insert(0, PARENTS[path[0] - 1])
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_scores_as_if_alone(family: str, tiny: Callable[[str], Path]) -> None:
    plain = load_plain(tiny(family))
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft="none", context_length=96)
    engine = generator.runtime.engine
    sequence = Sequence(PROMPT, SamplingParams(max_new_tokens=40))
    engine.start(sequence)
    draft = Draft([11, 22, 33, 44, 55, 66, 77], PARENTS)
    scored = engine.verify(sequence.pending_id, draft)
    tokens = [sequence.pending_id, *draft.token_ids]
    for node in range(draft.nodes):
        alone = PROMPT + [tokens[at] for at in path_to(node)]
        with torch.no_grad():
            expected = plain(torch.tensor([alone]), output_hidden_states=True)
        torch.testing.assert_close(
            scored.logits[node], expected.logits[0, -1], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            scored.hidden_states[node], expected.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_holds_exact_entries_only(family: str, tiny: Callable[[str], Path]) -> None:
    """After rounds of drafting and rejecting, as if the tokens had been a prompt."""
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft_length=3, context_length=96)
    result = generator.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert 0 < result.stats["acceptance_rate"] < 1
    cache = generator.runtime.engine.cache
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    length = cache.lengths[0]
    assert length == len(PROMPT) + 39
    generator.generate(PROMPT + result.token_ids[:39], max_new_tokens=1, ignore_eos=True)
    for (keys, values), layer in zip(kept, cache.layers, strict=True):
        torch.testing.assert_close(keys[:, :, :length], layer.keys[:, :, :length])
        torch.testing.assert_close(values[:, :, :length], layer.values[:, :, :length])


class BranchingDrafter:
    """Knows the answer, and hides it among wrong branches: sometimes first, sometimes second."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.proposed = 0

    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        at = len(sequence.generated_ids)
        token_ids: list[int] = []
        parents: list[int] = []
        trunk = 0
        for depth, right in enumerate(self.answer[at : at + draft_length]):
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_accepted_path_is_kept(family: str, tiny: Callable[[str], Path]) -> None:
    count = 120
    expected = greedy_tokens(load_plain(tiny(family)), PROMPT, count)
    generator = Generator.from_pretrained(tiny(family), "1GiB", draft_length=4)
    generator.reserve(len(PROMPT) + count + 16)
    drafter = BranchingDrafter(expected)
    generator.runtime.engine.drafter = drafter
    result = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
    assert result.token_ids == expected
    steps = generator.last_run.decode
    assert drafter.proposed > count
    accepted = {step.accepted for step in steps}
    assert {0, 4} < accepted
