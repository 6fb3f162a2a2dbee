"""Texts that join, leave and share prefixes at random, with draft lengths that change from step to
step: each is what plain transformers writes of it alone.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import Generator
from speq.config import SamplingParams
from speq.engine.batch import Request
from tests.helpers.tiny_models import (
    WITH_STATES,
    drawn_tokens,
    greedy_tokens,
    load_plain,
    write_model,
)

DRAFTERS: dict[str, dict[str, Any]] = {
    "int4": {},
    "ngram": {"draft": "none"},
    "cached": {"draft": "none", "draft_nodes": 9},
}
SIDE_BY_SIDE, WAITING, CONTEXT = 3, 5, 192


class Asked:
    """Texts at random, many of which begin alike, and what each must become."""

    def __init__(self, plain: Any, seed: int) -> None:
        self.plain, self.rng = plain, random.Random(seed)
        self.beginnings = [[self.rng.randrange(5, 250) for _ in range(60)] for _ in range(3)]

    def next(self) -> tuple[list[int], dict[str, Any], list[int]]:
        rng = self.rng
        prompt = rng.choice(self.beginnings)[: rng.randint(1, 60)]
        prompt = prompt + [rng.randrange(5, 250) for _ in range(rng.randint(0, 60))]
        tokens = rng.randint(1, 30)
        options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
        if rng.random() < 0.5:
            return prompt, options, greedy_tokens(self.plain, prompt, tokens)
        options |= {"temperature": 0.8, "seed": rng.randrange(4)}
        return prompt, options, drawn_tokens(self.plain, prompt, tokens, SamplingParams(**options))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("family", "texts"),
    [
        pytest.param(family, texts, marks=mark)
        for texts, mark in ((12, pytest.mark.wide), (60, pytest.mark.full))
        for family in ("olmoe", "qwen3_next", "lfm2_moe", "gpt_oss", "deepseek_v3")
    ],
)
def test_texts_at_random(family: str, texts: int, drafter: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / family, family, torch.float32)
    asked = Asked(load_plain(model), seed=texts)
    rng, done, left_early, reused = random.Random(7), 0, 0, 0
    generator = Generator.from_pretrained(
        model,
        "96MiB",
        drafter=drafter,
        max_batch=SIDE_BY_SIDE,
        context_length=CONTEXT,
        prefix_reuse="tokens",
        dtype="float32",
        **DRAFTERS[drafter],
    )
    under: dict[Request, list[int]] = {}
    with generator.batch() as batch:
        while done < texts:
            if len(under) < WAITING and rng.random() < 0.6:
                prompt, options, expected = asked.next()
                under[batch.add(generator.prepare(prompt, None, options))] = expected
            # Some leave, one of them whatever chance says.
            if under and (rng.random() < 0.05 or (done and not left_early)):
                request = rng.choice([*under])
                batch.drop(request)
                expected = under.pop(request)
                made = request.output_token_ids
                assert made == expected[: len(made)]
                left_early += 1
            for emitted in batch.step(rng.choice([None, 0, 1, 3, 7])):
                assert emitted.error is None
                if emitted.request.finish_reason is None:
                    continue
                assert emitted.request.output_token_ids == under.pop(emitted.request)
                reused += emitted.request.metrics.cached_tokens
                done += 1
        for request in under:
            batch.drop(request)
    generator.close()
    assert left_early
    # States are kept of some places only.
    assert reused or family in WITH_STATES
