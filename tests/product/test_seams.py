"""What can be plugged in is: a drafter and a codec declared here, through the registries, and run.

An eviction policy is in test_policies.py, an option in test_options.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from speq import Generator, SpeqError
from speq.engine.draft import Draft
from speq.engine.drafter import DraftContext, DraftRequest
from speq.experts.codec import Matrices, RawCodec
from speq.registries import CODECS, DRAFTERS, Registry
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = [*range(40, 60)]
TOKENS = 40


@dataclass(frozen=True, slots=True)
class DownFirst(RawCodec):
    """Plain words, down_proj before gate_up_proj."""

    name: ClassVar[str] = "down-first"

    def _matrices(self, slots: Tensor) -> Matrices:
        shape = self.shape
        words = slots.view(shape.dtype)[:, : shape.weights]
        split = shape.expert_width * shape.hidden_size
        gate_up_proj = words[:, split:].unflatten(1, shape.gate_up_shape)
        return gate_up_proj, words[:, :split].unflatten(1, shape.down_shape)


class Parrot:
    """Proposes the pending token again and again."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, base: DraftContext) -> None:
        assert base.int4 is None

    def propose(self, asked: DraftRequest) -> Draft:
        return Draft.chain([asked.request.pending_id] * asked.limits.length)


def test_a_drafter_is_a_class_and_a_line(tiny: Callable[[str], Path]) -> None:
    expected = greedy_tokens(load_plain(tiny("olmoe")), PROMPT, TOKENS)
    with DRAFTERS.registered("parrot", Parrot, "says it again"):
        generator = Generator.from_pretrained(
            tiny("olmoe"), "64MiB", dtype="float32", drafter="parrot", draft_length=3
        )
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        assert generator.runtime.residency_plan.drafter == "parrot"
        assert generator.runtime.plan.items["draft"] == 0
        generator.close()
    assert made.token_ids == expected
    repeats = sum(a == b for a, b in pairwise(expected))
    drafted = made.stats["draft_length_mean"] * made.stats["steps"]
    assert drafted > TOKENS / 2
    # Only a token that repeats the one before can stand.
    assert made.stats["acceptance_rate"] * drafted <= repeats


def test_a_codec_is_a_class_and_a_line(tiny: Callable[[str], Path]) -> None:
    expected = greedy_tokens(load_plain(tiny("olmoe")), PROMPT, TOKENS)
    with CODECS.registered("down-first", DownFirst, "down_proj first"):
        generator = Generator.from_pretrained(
            tiny("olmoe"), "1MiB", dtype="float32", codec="down-first", draft="none"
        )
        runtime = generator.runtime
        assert runtime.plan.slots < runtime.opened.store.num_layers * 8
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        generator.close()
    assert made.stats["codec"] == "down-first"
    assert made.token_ids == expected


def test_words_in_another_order_are_the_same_words() -> None:
    from speq.experts.codec import ExpertShape

    codec = DownFirst(ExpertShape(8, 4, torch.float32))
    exact = torch.randn(8, 8), torch.randn(8, 4)
    slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
    codec.encode(exact, None, slot)
    assert torch.equal(slot[:128].view(torch.float32), exact[1].flatten())
    assert all(map(torch.equal, codec.decode(slot), exact))


def test_names_are_unique_and_unknown_ones_are_told_the_others() -> None:
    registry = Registry("toy", top=("collections:Counter", "spins"), kite=("x:Y", "flies"))
    from collections import Counter

    assert registry.names == ("top", "kite")
    assert registry["top"] is Counter
    assert registry.summary("kite") == "flies"
    with pytest.raises(SpeqError, match="toy 'ball' is unknown; give one of top, kite"):
        registry["ball"]
    with pytest.raises(SpeqError, match="there is a toy 'top' already"):
        registry.register("top", Counter, "")
    with registry.registered("ball", Counter):
        assert "ball" in registry
    assert "ball" not in registry


@pytest.mark.parametrize("registry", [CODECS, DRAFTERS], ids=lambda registry: registry.kind)
def test_every_entry_is_there(registry: Registry) -> None:
    for name in registry.names:
        assert isinstance(registry[name], type)
        assert registry.summary(name)
