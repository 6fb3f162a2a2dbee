"""Prompt lookup, beside a search through the whole text."""

import random

import pytest

from speq.config import SamplingParams
from speq.decode.drafter import DraftBase, DraftBounds
from speq.decode.drafters.ngram import NgramDrafter
from speq.decode.sampler import HostSampler
from speq.decode.sequence import Draft, Sequence


def drafter() -> NgramDrafter:
    return NgramDrafter(DraftBase(None, None, None, HostSampler()))  # type: ignore[arg-type]


def sequence(prompt: list[int], eos: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(prompt, SamplingParams(max_new_tokens=1000), eos)


def propose(of: NgramDrafter, text: Sequence, draft_length: int) -> list[int]:
    draft = of.propose(text, DraftBounds(draft_length), lambda *_: None, lambda *_: True)
    assert draft == Draft.chain(draft.token_ids)
    return draft.token_ids


def searched(tokens: list[int], draft_length: int) -> list[int]:
    """What followed the last place before the end where the longest end of the text stood."""
    for length in (4, 3, 2):
        for at in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[at - length : at] == tokens[-length:]:
                again = tokens[at:] * draft_length
                return again[:draft_length]
    return []


@pytest.mark.parametrize("alphabet", [2, 3, 8])
def test_drafts_are_those_of_a_search(alphabet: int) -> None:
    rng, of, found = random.Random(alphabet), drafter(), 0
    for _ in range(20):
        text = sequence([rng.randrange(alphabet) for _ in range(rng.randint(1, 12))])
        for _ in range(40):
            drafted = propose(of, text, 5)
            assert drafted == searched(text.prompt_ids + text.generated_ids, 5)
            found += bool(drafted)
            # As after an accepted draft: several tokens at a time.
            text.extend([rng.randrange(alphabet) for _ in range(rng.randint(1, 4))])
    assert found > 100


def test_a_text_that_repeats_is_gone_on_with() -> None:
    text = sequence([1, 2, 3, 4, 5, 1, 2, 3])
    assert propose(drafter(), text, 2) == [4, 5]
    assert propose(drafter(), text, 9) == [4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert propose(drafter(), sequence([7, 7, 7]), 4) == [7, 7, 7, 7]
    assert propose(drafter(), text, 0) == []


def test_nothing_is_drafted_behind_an_end() -> None:
    text = sequence([1, 2, 9, 4, 1, 2], eos=frozenset({9}))
    assert propose(drafter(), text, 4) == [9]


def test_another_sequence_is_not_drafted_from() -> None:
    of = drafter()
    assert propose(of, sequence([1, 2, 3, 1, 2]), 1) == [3]
    assert propose(of, sequence([5, 1, 2]), 1) == []
