"""The longest drafts and the largest trees that options allow: no row of a verification comes out
otherwise than alone, whatever of it stands. The oracle is plain transformers'.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from speq import Generator
from speq.config import MAX_BATCH, MAX_DRAFT_LENGTH, MAX_DRAFT_NODES
from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest
from speq.kernels.ops import MAX_LINEAR_ROWS
from tests.helpers.tiny_models import (
    FAMILIES,
    VOCAB,
    greedy_tokens,
    load_plain,
)

NEW_TOKENS, FEW = 160, 4
# More tokens than are run one by one, and texts that differ from their first token on.
PROMPTS = ([(7 * at) % 250 for at in range(70)], [(5 * at + 3) % 250 for at in range(70)])
# Tokens of a draft that stand, draft by draft.
STANDS = (MAX_DRAFT_LENGTH, 1, 0, 40, MAX_DRAFT_LENGTH - 1)
EACH_FAMILY = [
    pytest.param(
        family, marks=[] if family in ("qwen2_moe", "qwen3_next", "lfm2_moe") else pytest.mark.wide
    )
    for family in FAMILIES
]


@dataclass
class Told:
    """A drafter that is told the texts [first token: tokens], and of how many it is to be right."""

    texts: dict[int, list[int]]
    drafts: list[Draft] = field(default_factory=list)

    def propose(self, asked: DraftRequest) -> Draft:
        request, limits = asked.request, asked.limits
        right = self.texts[request.prompt_token_ids[0]][len(request.output_token_ids) :]
        stands = STANDS[len(self.drafts) % len(STANDS)]
        right = [*right, *[0] * limits.length][: limits.length]
        drafted = [token if at < stands else (token + 1) % VOCAB for at, token in enumerate(right)]
        draft = Draft.chain(drafted)
        if limits.nodes is not None:
            draft = branching(drafted, limits.nodes)
        self.drafts.append(draft)
        return draft


def branching(path: list[int], nodes: int) -> Draft:
    """A tree of so many tokens: each one of a path behind another one that is wrong."""
    tokens: list[int] = []
    parents: list[int] = []
    for at, token in enumerate(path):
        tokens += [(token + 2) % VOCAB, token]
        parents += [2 * at, 2 * at]
    return Draft(tokens[:nodes], parents[:nodes])


def loaded(model: Path, **options: Any) -> Generator:
    return Generator.from_pretrained(
        model,
        "64MiB",
        context_length=len(PROMPTS[0]) + NEW_TOKENS,
        draft_length=MAX_DRAFT_LENGTH,
        packed_copy="none",
        profile="none",
        **options,
    )


def told(generator: Generator, texts: list[list[int]]) -> list[Told]:
    generator.reserve(len(PROMPTS[0]) + NEW_TOKENS)
    by_first = {prompt[0]: text for prompt, text in zip(PROMPTS, texts, strict=True)}
    drafters = [Told(by_first) for _ in generator.runtime.engine.drafters]
    generator.runtime.engine.drafters = [*drafters]
    return drafters


@pytest.fixture
def expected(tiny: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    def of(family: str) -> list[list[int]]:
        plain = load_plain(tiny(family))
        return [greedy_tokens(plain, prompt, NEW_TOKENS) for prompt in PROMPTS]

    return of


def test_as_many_rows_as_are_run_alike() -> None:
    """With the pending token of a text."""
    assert MAX_DRAFT_LENGTH + 1 == MAX_DRAFT_NODES + 1 == MAX_BATCH == MAX_LINEAR_ROWS


@pytest.mark.wide
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_longest_chains(
    family: str, tiny: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    """Of a text alone, and of two side by side, which share the rows."""
    texts = expected(family)
    generator = loaded(tiny(family), drafter="ngram", draft="none", max_batch=2)
    drafters = told(generator, texts)
    made = generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    steps = generator.last_run.decode
    assert made.token_ids == texts[0]
    assert max(step.rows for step in steps) == MAX_LINEAR_ROWS
    assert {0, 1, MAX_DRAFT_LENGTH} <= {step.accepted for step in steps}
    assert max(len(draft.token_ids) for draft in drafters[0].drafts) == MAX_DRAFT_LENGTH
    both = generator.generate_batch([*PROMPTS], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    steps = generator.last_run.decode
    generator.close()
    assert [each.token_ids for each in both] == texts
    assert max(step.rows for step in steps) == MAX_LINEAR_ROWS


@pytest.mark.wide
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_largest_trees(
    family: str, tiny: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    texts = expected(family)
    generator = loaded(tiny(family), drafter="int4", draft_nodes=MAX_DRAFT_NODES)
    (drafter,) = told(generator, texts)
    made = generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    steps = generator.last_run.decode
    generator.close()
    assert made.token_ids == texts[0]
    assert max(len(draft.token_ids) for draft in drafter.drafts) == MAX_DRAFT_NODES
    assert max(step.rows for step in steps) == MAX_LINEAR_ROWS
    assert {step.accepted for step in steps} >= {0, 1, MAX_DRAFT_NODES // 2}


@pytest.mark.wide
@pytest.mark.parametrize("nodes", [None, MAX_DRAFT_NODES])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_drafts_of_a_model(
    family: str, nodes: int | None, tiny: Callable[[str], Path]
) -> None:
    """Whose own entries and states are given up before they are verified."""
    expected = greedy_tokens(load_plain(tiny(family)), PROMPTS[0], FEW)
    generator = loaded(tiny(family), drafter="int4", draft_nodes=nodes)
    tokens = generator.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [token.id for token in islice(tokens, FEW)] == expected
    tokens.close()
    steps = generator.last_run.decode
    generator.close()
    assert max(step.rows for step in steps) == MAX_LINEAR_ROWS
