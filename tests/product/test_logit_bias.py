"""What requests add to logits: the exact model's tokens by transformers' own processors, whoever
drafts.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from speq import Generator
from speq.config import SamplingParams
from speq.engine.logit_bias import LogitBias
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = [*b"hello there"]
COUNT = 24


def said(generator: Generator, bias: LogitBias | None, **options: Any) -> list[int]:
    sampling = SamplingParams(max_new_tokens=COUNT, **options)
    request = generator.request(PROMPT, sampling)
    request.bias = bias
    with generator.batch(request.context) as batch:
        batch.add(request)
        while not batch.idle:
            batch.step()
    return request.output_token_ids


@pytest.mark.parametrize(
    "drafts",
    [
        {"draft_length": 0},
        {"drafter": "int4", "draft_length": 4},
        {"drafter": "ngram", "draft_length": 3},
        {"drafter": "int4", "draft_length": 3, "draft_nodes": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_bias_is_added_before_penalties(
    drafts: dict[str, Any], penalty: float, tiny: Callable[[str], Path]
) -> None:
    folder = tiny("qwen3_moe")
    plain = load_plain(folder)
    free = greedy_tokens(plain, PROMPT, COUNT)
    # Those that would be said are unlikely, and others are likelier.
    values = {free[0]: -4.0, free[1]: -100.0, free[0] ^ 1: 3.0, 77: 0.25}
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[each], value] for each, value in values.items()]),
            RepetitionPenaltyLogitsProcessor(penalty),
        ]
    )
    wanted = greedy_tokens(plain, PROMPT, COUNT, processors)
    assert wanted != free
    made = Generator.from_pretrained(folder, "2MiB", dtype="float32", **drafts)
    with closing(made) as generator:
        told = said(generator, LogitBias(values), ignore_eos=True, repetition_penalty=penalty)
    assert told == wanted


@pytest.mark.parametrize("length", [0, 3])
def test_no_end_before_the_least_length(length: int, tiny: Callable[[str], Path]) -> None:
    folder = tiny("qwen3_moe")
    plain = load_plain(folder)
    free = greedy_tokens(plain, PROMPT, COUNT)
    ends = {free[2], free[5]}
    processors = LogitsProcessorList(
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, sorted(ends), device="cpu")]
    )
    wanted = greedy_tokens(plain, PROMPT, COUNT, processors)
    assert not ends & {*wanted[:8]}
    made = Generator.from_pretrained(folder, "2MiB", dtype="float32", draft_length=length)
    with closing(made) as generator:
        bias = LogitBias(ends=frozenset(ends), min_new_tokens=8)
        assert said(generator, bias, ignore_eos=True) == wanted


def test_a_stop_token_ends_in_any_case(tiny: Callable[[str], Path]) -> None:
    folder = tiny("qwen3_moe")
    free = greedy_tokens(load_plain(folder), PROMPT, COUNT)
    made = Generator.from_pretrained(folder, "2MiB", dtype="float32", draft_length=3)
    with closing(made) as generator:
        request = generator.request(PROMPT, SamplingParams(max_new_tokens=COUNT, ignore_eos=True))
        request.stop_token_ids = frozenset({free[4]})
        with generator.batch(request.context) as batch:
            batch.add(request)
            while not batch.idle:
                batch.step()
    first = free.index(free[4])
    assert request.output_token_ids == free[: first + 1]
    assert request.finish_reason == "eos"
