"""Prompt lookup, beside a search through the whole text."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from speq import Generation, Generator
from speq.config import RunConfig, SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftContext, DraftLimits, DraftRequest
from speq.engine.drafters.ngram import NgramDrafter
from speq.engine.request import Request
from speq.engine.sampler import HostSampler
from speq.planning.candidates import secondary_drafter


def drafter() -> NgramDrafter:
    return NgramDrafter(DraftContext(None, None, None, HostSampler()))  # type: ignore[arg-type]


def request(prompt: list[int], eos: frozenset[int] = frozenset()) -> Request:
    return Request(prompt, SamplingParams(max_new_tokens=1000), eos)


def propose(of: NgramDrafter, text: Request, draft_length: int) -> list[int]:
    draft = of.propose(
        DraftRequest(text, DraftLimits(draft_length), lambda *_: None, lambda *_: True)
    )
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
        text = request([rng.randrange(alphabet) for _ in range(rng.randint(1, 12))])
        for _ in range(40):
            drafted = propose(of, text, 5)
            assert drafted == searched(text.prompt_token_ids + text.output_token_ids, 5)
            found += bool(drafted)
            # As after an accepted draft: several tokens at a time.
            text.extend([rng.randrange(alphabet) for _ in range(rng.randint(1, 4))])
    assert found > 100


def test_a_text_that_repeats_is_gone_on_with() -> None:
    text = request([1, 2, 3, 4, 5, 1, 2, 3])
    assert propose(drafter(), text, 2) == [4, 5]
    assert propose(drafter(), text, 9) == [4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert propose(drafter(), request([7, 7, 7]), 4) == [7, 7, 7, 7]
    assert propose(drafter(), text, 0) == []


def test_nothing_is_drafted_behind_an_end() -> None:
    text = request([1, 2, 9, 4, 1, 2], eos=frozenset({9}))
    assert propose(drafter(), text, 4) == [9]


def test_it_tells_beforehand_whether_it_has_a_draft() -> None:
    rng, of = random.Random(2), drafter()
    text = request([1, 2, 3])
    for _ in range(200):
        assert of.has_proposal(text) == bool(
            searched(text.prompt_token_ids + text.output_token_ids, 1)
        )
        text.extend([rng.randrange(6)])


@pytest.mark.parametrize("budget", ["none", "int4"])
def test_texts_that_repeat_are_drafted_by_it_beside_any_drafter(bundled: Path, budget: str) -> None:
    """And are the same. Where options name who drafts or how far, it does not draft."""
    prompt = "def main(argv):\n    return 0\n\n" * 3
    memory = {"none": "32MiB", "int4": "96MiB"}[budget]

    def made(**options: Any) -> Generation:
        config = RunConfig.of(memory, dtype="float32", profile="none", **options)
        with contextlib.closing(Generator.load(bundled, config)) as generator:
            return generator.generate(prompt, max_new_tokens=64)

    alone = made(draft="none")
    beside = made()
    assert beside.token_ids == alone.token_ids
    assert beside.stats["side_steps"] > 0 and beside.stats["steps"] < 64
    assert alone.stats["side_steps"] == 0 and alone.stats["steps"] == 63


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "int4"},
        {"drafter": "none"},
        {"draft": "none"},
        {"draft_length": 2},
        {"expert_budget": "50%"},
    ],
)
def test_it_is_beside_others_only_where_options_leave_that_open(options: dict[str, Any]) -> None:
    assert secondary_of(RunConfig.of("1GiB")) == "ngram"
    assert secondary_of(RunConfig.of("1GiB", **options)) is None


def secondary_of(config: RunConfig) -> str | None:
    return secondary_drafter(config, config.approximates)


def test_another_sequence_is_not_drafted_from() -> None:
    of = drafter()
    assert propose(of, request([1, 2, 3, 1, 2]), 1) == [3]
    assert propose(of, request([5, 1, 2]), 1) == []
