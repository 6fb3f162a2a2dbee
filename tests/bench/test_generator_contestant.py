"""A generator as a contestant: its tokens and its choices are those of plain transformers."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from speq.bench.rivals.contestant import Contestant
from speq.bench.rivals.generator_contestant import GeneratorContestant
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.generator import Generator
from speq.models.opened import open_model
from tests.helpers.smallest import two_slot_budget
from tests.helpers.tiny_models import greedy_tokens, load_plain

Folder = Callable[[str], Path]
PROMPT = [*b"once upon"]
# Not what any model would say: choices must be asked behind each of them.
CONTINUATION = [*b"x7 Qq.\n~ab"]


def contestant(model: Path, budget: str, **options: Any) -> Contestant:
    return GeneratorContestant(Generator.from_pretrained(model, budget, profile="none", **options))


@pytest.fixture(scope="module")
def plain(tiny: Folder) -> Any:
    return load_plain(tiny("qwen3_moe"))


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "drafting"])
def made(request: pytest.FixtureRequest, tiny: Folder) -> Iterator[Contestant]:
    length = request.param
    with closing(contestant(tiny("qwen3_moe"), "8MiB", draft_length=length)) as each:
        yield each


def test_tokens_come_one_by_one_and_each_stream_begins_anew(made: Contestant, plain: Any) -> None:
    wanted = greedy_tokens(plain, PROMPT, 12)
    stream = made.stream(PROMPT, 12)
    assert next(stream) == wanted[0]
    stream.close()  # type: ignore[attr-defined]
    assert list(made.stream(PROMPT, 12)) == wanted
    figures = made.figures()
    assert figures["new_tokens"] == 12 and figures["tpot_ms"] > 0


def test_choices_are_asked_behind_each_given_token(made: Contestant, plain: Any) -> None:
    list(made.stream(PROMPT, 3))
    text = torch.tensor([PROMPT + CONTINUATION])
    with torch.inference_mode():
        logits = plain(text).logits[0]
    wanted = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert wanted != CONTINUATION
    for count in range(len(CONTINUATION) + 1):
        assert made.choices(PROMPT, CONTINUATION[:count]) == wanted[:count]
    assert made.figures()["new_tokens"] == 3  # the last stream's, still
    assert list(made.stream(PROMPT, 5)) == greedy_tokens(plain, PROMPT, 5)


def test_it_says_how_the_model_is_held(tiny: Folder) -> None:
    model = tiny("qwen3_moe")
    with closing(contestant(model, "8MiB", draft_length=2, codec="raw", dense="raw")) as drafting:
        settled = drafting.settled()
        named = ("codec", "encoded", "dense", "drafter", "draft_length")
        assert [settled[name] for name in named] == ["raw", False, "raw", "int4", 2]
        assert settled["memory"]["budget"] == 8 << 20
    with closing(contestant(model, "8MiB", draft="none", draft_length="auto")) as without:
        assert without.settled()["draft_length"] == 0
        assert without.settled()["drafter"] == "none"
        assert without.figures() == {}


def test_an_opened_model_is_closed_where_loading_fails(tiny: Folder) -> None:
    model = tiny("qwen3_moe")
    budget, _ = two_slot_budget(model, 64, "float32", 0)
    opened = open_model(model)
    file = next(iter(opened.checkpoint.tensors.values()))[0]
    with pytest.raises(SpeqError, match="too small"):
        Generator.of_opened(opened, RunConfig.of(budget // 2, 0, codec="raw"))
    with pytest.raises(SpeqError, match="failed: Bad file descriptor"):
        file.read_into(0, torch.empty(1, dtype=torch.uint8))
