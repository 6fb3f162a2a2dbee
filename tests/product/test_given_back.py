"""Memory of a model that is closed is given back at once: nobody has to look for circles."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import Generator, SpeqError
from tests.helpers.often import often
from tests.helpers.tiny_models import FAMILIES

Folder = Callable[[str], Path]
# One of each kind: walked, transformers' own pass, states, biases, norms behind experts.
FEW = ("qwen3_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe", "gpt_oss", "gemma4")


def tensors() -> list[torch.Tensor]:
    # By type: proxies of other libraries answer isinstance by what they stand for.
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [each for each in gc.get_objects() if type(each) in kinds]


@contextmanager
def nothing_left() -> Iterator[Callable[[], int]]:
    """No tensor of the block is there after it. Gives what counts their bytes."""
    gc.collect()
    gc.disable()
    known = {id(each): each for each in tensors()}  # which keeps their numbers taken

    def held_bytes() -> int:
        return sum(each.nbytes for each in tensors() if id(each) not in known)

    try:
        yield held_bytes
        assert held_bytes() == 0
    finally:
        gc.enable()


def run(model: Path, held_bytes: Callable[[], int] = lambda: 1 << 20, **options: Any) -> None:
    generator = Generator.from_pretrained(model, "64MiB", profile="none", **options)
    generator.generate([1, 2, 3, 4], max_new_tokens=6, ignore_eos=True)
    assert held_bytes() > 500_000
    generator.close()


def given_back(model: Path, **options: Any) -> None:
    run(model, **options)  # libraries keep something of the first time
    with nothing_left() as held_bytes:
        run(model, held_bytes, **options)


@pytest.mark.parametrize(
    "family",
    often([*FEW, *(each for each in FAMILIES if each not in FEW)], quick=2, wide=4),
)
def test_a_generator_that_was_closed(family: str, tiny_bfloat16: Folder) -> None:
    given_back(tiny_bfloat16(family))


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "int4", "draft_length": 3, "draft_nodes": 6},
        {"drafter": "cached", "draft_length": 2, "codec": "lossless", "dense": "lossless"},
    ],
    ids=lambda options: options["drafter"],
)
def test_drafters_and_codecs(options: dict[str, Any], tiny_bfloat16: Folder) -> None:
    given_back(tiny_bfloat16("qwen3_moe"), **options)


def test_a_load_that_failed(tiny_bfloat16: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its weights read."""
    held: list[int] = []

    def fail() -> None:
        held.append(held_bytes())
        raise SpeqError("no more")

    model = tiny_bfloat16("qwen3_moe")
    run(model)
    monkeypatch.setattr("speq.load.heap.give_back", fail)
    with nothing_left() as held_bytes:
        try:
            Generator.from_pretrained(model, "64MiB", profile="none")
        except SpeqError as error:
            assert str(error) == "no more"
    assert held[0] > 100_000
