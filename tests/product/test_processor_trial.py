"""What is measured of a processor as a model is loaded, by clocks that say what they are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.experts.codec import ExpertShape
from speq.experts.expert_store import expert_slot
from speq.experts.int4 import Int4Layout
from speq.models.opened import open_model
from speq.planning import layer_trial
from speq.planning.cost.presets import LAYER_S
from speq.planning.layer_trial import DEEP, PASSES, WIDE, PassTimes, passes_s
from speq.planning.link_trial import link_bytes_per_s
from speq.planning.processor_trial import LEAST_LAYER_S, ProcessorTrial, narrow_shape
from speq.routing import Route

Folder = Callable[[str], Path]


def test_the_shortest_call_counts_and_the_first_one_does_not() -> None:
    took = [0.01, *(0.5 + 0.1 * turn for turn in range(PASSES))]
    now_s = [0.0]

    def run() -> None:
        now_s[0] += took.pop(0)

    assert passes_s(run, lambda: now_s[0]) == pytest.approx(0.5)
    assert not took


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "phimoe", "mixtral"])
def test_a_layer_is_timed_apart_from_its_pass(
    family: str, tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer takes a second, and a tenth for each row; a pass a second and a half besides."""
    now_s, rows_seen = [0.0], []

    def slow_layer(_: object, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        rows_seen.append(len(hidden_states))
        now_s[0] += 1 + 0.1 * len(hidden_states)
        return torch.zeros_like(hidden_states)

    asked = [0]

    def clock() -> float:
        asked[0] += 1
        now_s[0] += 1.5 * (asked[0] % 2 == 0)  # between the two looks at it
        return now_s[0]

    monkeypatch.setattr(layer_trial.NoExperts, "__call__", slow_layer)
    opened = open_model(tiny(family))
    try:
        times = PassTimes.of(opened, torch.float32, clock)
    finally:
        opened.close()
    assert times.layer_s == pytest.approx(1.1)
    assert times.row_s == pytest.approx(0.1)
    assert times.base_s == pytest.approx(1.5)
    runs = PASSES + 1
    deep = min(DEEP, opened.shape.num_layers)
    assert rows_seen == [1] * runs + [1] * deep * runs + [WIDE] * deep * runs


def test_a_survey_of_a_small_model(tiny_bfloat16: Folder) -> None:
    opened = open_model(tiny_bfloat16("qwen2_moe"))
    try:
        experts = opened.shape.experts
        layout = Int4Layout(experts.hidden_size, experts.expert_width)
        ticks = iter(range(10**6))
        trial = ProcessorTrial(
            opened, torch.bfloat16, layout, 2, 1 << 24, lambda: float(next(ticks))
        )
        survey = trial.survey(["raw", "lossless"])
        nbytes = opened.store.codec.shape.nbytes
        top_k = opened.shape.top_k
        # Each look at the clock is a second after the last: all calls take one.
        assert survey.expert_s == {"raw": 1 / top_k, "lossless": 1 / top_k}
        assert survey.draft_expert_s == 1 / top_k
        assert survey.encode_bytes_per_s == {"raw": nbytes / 2, "lossless": nbytes / 2}
        assert survey.memory_bytes_per_s == pytest.approx(0.9 * (1 << 24))
        assert (survey.pass_s, survey.layer_s) == (1.0, LEAST_LAYER_S)
        # A layer that the budget has no room for is not tried.
        small = ProcessorTrial(opened, torch.bfloat16, None, 2, 1, lambda: float(next(ticks)))
        untried = small.survey(["raw"])
        assert untried.layer_s == pytest.approx(LAYER_S)
        assert (untried.pass_s, untried.draft_expert_s) == (0.0, 0.0)
    finally:
        opened.close()


def test_the_link_is_what_threads_read_together(tiny: Folder) -> None:
    opened = open_model(tiny("qwen2_moe"))
    try:
        given: Any = opened.store
        nbytes, reads = given.codec.shape.nbytes, []

        class Store:
            num_layers, num_experts, codec = given.num_layers, given.num_experts, given.codec

            def moved_bytes(self, layer: int, expert: int) -> int:
                return nbytes

            def read(self, layer: int, expert: int, slot: Tensor) -> int:
                reads.append((layer, expert))
                return nbytes

        store: Any = Store()
        count = store.num_layers * store.num_experts
        slots = [expert_slot(given)]
        speed = link_bytes_per_s(store, slots, lambda: len(reads) * 1e-3)
        # All experts once, and one before the clock was looked at.
        assert len(reads) == count + 1
        assert speed == pytest.approx(nbytes / 1e-3)
        assert set(reads[1:]) == {divmod(at, store.num_experts) for at in range(count)}
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("hidden", "width", "narrow"),
    [(64, 48, 48), (2048, 1408, 128), (256, 64, 64), (512, 4096, 256)],
)
def test_large_experts_are_tried_narrower(hidden: int, width: int, narrow: int) -> None:
    shape = narrow_shape(ExpertShape(hidden, width, torch.bfloat16))
    assert (shape.hidden_size, shape.expert_width) == (hidden, narrow)
