"""The keystone where drafters change from step to step: the tokens are the exact model's."""

from contextlib import nullcontext
from typing import Any

import pytest

from speq import Generator
from speq.config import SamplingParams
from speq.governor.batches import Governors
from speq.stats import StepStats
from tests.helpers.aside import ByTurns, Told
from tests.helpers.cells import Cell, Folders
from tests.helpers.heads import write_random_head
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.tiny_models import (
    FAMILIES,
    UNLIKE_IN_CACHES,
    drawn_tokens,
    greedy_tokens,
    load_plain,
)

PROMPT = [5, 9, 200, 31, 7, 7, 90, 4]
NEW_TOKENS = 24


def marks(at: int) -> list[pytest.MarkDecorator]:
    return [] if not at else [pytest.mark.wide if at == 1 else pytest.mark.full]


@pytest.mark.parametrize(
    ("family", "device", "drafter"),
    [
        pytest.param(family, device, ("int4", "none", "head")[at % 3], marks=marks(at + shift))
        for shift, device in enumerate(("cpu", "cuda"))
        for at, family in enumerate(FAMILIES)
        if device == "cpu" or family in UNLIKE_IN_CACHES
    ],
)
def test_drafters_change_from_step_to_step(
    family: str, device: str, drafter: str, folders: Folders
) -> None:
    """Beside an INT4 copy, beside a head that knows nothing, and alone."""
    cell = Cell(2, "all", "own")
    model = folders.published(family, cell)
    if drafter == "head":
        write_random_head(model, names=True)
    plain = load_plain(model)
    limits: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    drawn: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    with host_device(HostDevice(3)) if device == "cuda" else nullcontext():
        generator = Generator.from_pretrained(
            model,
            1 << 30,
            device=device,
            dtype="float32",
            context_length=len(PROMPT) + NEW_TOKENS,
            drafter=drafter,
            dense="raw",
            profile="none",
        )
        engine = generator.runtime.engine
        engine.governors = Governors(ByTurns(2 if drafter != "none" else 0), most_rows=16)

        def made(expected: list[int], **sampling: Any) -> list[StepStats]:
            engine.secondary_drafters = [Told(expected)]
            result = generator.generate(PROMPT, **limits, **sampling)
            assert result.token_ids == expected
            assert generator.last_run is not None
            return generator.last_run.decode

        steps = made(greedy_tokens(plain, PROMPT, NEW_TOKENS))
        made(drawn_tokens(plain, PROMPT, NEW_TOKENS, SamplingParams(**drawn)), **drawn)
        generator.close()
    aside = [step for step in steps if step.drafter == "ngram"]
    assert aside and all(step.accepted == step.draft_length - 1 for step in aside)
    others = [step.draft_length > 0 for step in steps if step.drafter is None]
    assert any(others) == (drafter != "none")
