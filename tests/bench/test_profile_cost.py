"""What recording costs: the arithmetic over pairs, and a small run."""

import json
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speq import Generator, SpeqError
from speq.bench.runs import profile_cost
from speq.bench.runs.profile_cost import Timed, interval, summed_up
from speq.stats import StepStats
from tests.helpers.told import Told

Folder = Callable[[str], Path]


class Heard:
    """A recording that keeps the steps it heard, run by run."""

    runs: list[list[StepStats]]

    def __init__(self, generator: Generator) -> None:
        self.listeners = generator.runtime.recorder.listeners
        self.stream = generator.stream

    def __enter__(self) -> "Heard":
        self.runs.append([])
        self.listeners.append(self.runs[-1].append)
        return self

    def __exit__(self, *error: object) -> None:
        self.listeners.remove(self.runs[-1].append)


class Ticks:
    """A clock that goes on by a second for each step that somebody hears of, and one besides."""

    def __init__(self, runs: list[list[StepStats]]) -> None:
        self.runs, self.calls = runs, 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.calls + sum(map(len, self.runs)))


def pairs_of(off: list[float], on: list[float]) -> list[tuple[Timed, Timed]]:
    return [(Timed(a, 0), Timed(b, 1)) for a, b in zip(off, on, strict=True)]


def test_pairs_are_summed_up() -> None:
    row = summed_up(pairs_of([10.0, 20.0, 40.0, 10.0], [11.0, 18.0, 42.0, 12.0]))
    assert row == {
        "pairs": 4,
        "tpot_off_ms": 15.0,
        "tpot_on_ms": 15.0,
        "ratio": pytest.approx((1.05 + 1.1) / 2),
        "ratio_low": None,
        "ratio_high": None,
        "slower": 0.75,
        "listeners_off": 0,
        "listeners_on": 1,
        "pairs_ms": [[10.0, 11.0], [20.0, 18.0], [40.0, 42.0], [10.0, 12.0]],
    }
    assert summed_up(pairs_of([1.0], [1.0]))["slower"] == 0
    row = summed_up(pairs_of([1.0] * 6, [1.5, 1.1, 1.2, 1.3, 1.4, 1.0]))
    assert (row["ratio_low"], row["ratio_high"]) == (1.0, 1.5)


def test_the_interval_is_that_of_the_sign_test() -> None:
    """By the binomial distribution: at most 5 of 100 samples leave their median outside."""
    assert [interval(range(count)) is None for count in range(1, 7)] == [True] * 5 + [False]
    for count, place in ((6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (25, 8), (50, 18)):
        found = interval(range(1, count + 1))
        assert found == (place, count + 1 - place)
        # So many of all ways to lie left or right of the median leave it outside, and no fewer do.
        for k, enough in ((place, True), (place + 1, False)):
            outside = 2 * sum(comb(count, below) for below in range(k)) / 2**count
            assert (outside <= 0.05) == enough
    assert interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two that the small models have room for."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one and two"}\n{"prompt": "three"}\n')
    return path


def settings(**changes: Any) -> profile_cost.Settings:
    given: dict[str, Any] = {
        "memory_budget": "2MiB",
        "pairs": 3,
        "num_prompts": 2,
        "max_new_tokens": 6,
        "run": {"dtype": "float32", "device": "cpu", "draft_length": 2},
    }
    return profile_cost.Settings(**(given | changes))


def test_pairs_alternate_in_one_generator(
    tiny: Folder, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heard.runs = []
    monkeypatch.setattr(profile_cost, "Recording", Heard)
    order: list[bool] = []
    timed = profile_cost.timed

    def noted(*arguments: Any) -> Timed:
        order.append(arguments[3])
        return timed(*arguments)

    monkeypatch.setattr(profile_cost, "timed", noted)
    told = Told()
    target, clock = tmp_path / "cost.json", Ticks(Heard.runs)
    report = profile_cost.run(
        str(tiny("qwen2_moe")), settings(prompts=prompts), target, False, told, clock
    )
    assert told.steps("measuring pairs") == 4
    assert order == [False, True, True, False, False, True, True, False]
    # Nobody hears of a run that is not recorded.
    assert len(Heard.runs) == 4
    assert all([step.phase for step in run].count("prefill") == 2 for run in Heard.runs)
    (row,) = report.rows
    assert (row["pairs"], row["listeners_off"], row["listeners_on"]) == (3, 0, 1)
    # By the clock of the test a text takes a second, and a recorded step another one.
    tokens = 2 * (6 - 1)
    seconds = [2 + sum(step.phase == "decode" for step in run) for run in Heard.runs[1:]]
    assert row["pairs_ms"] == [[2e3 / tokens, 1e3 * each / tokens] for each in seconds]
    assert row["slower"] == 1
    assert json.loads(target.read_text())["rows"] == report.rows


def test_a_real_recording_is_attached_and_taken_away(
    tiny: Folder, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    close = Generator.close

    def closed(self: Generator) -> None:
        left.append(len(self.runtime.recorder.listeners))
        close(self)

    monkeypatch.setattr(Generator, "close", closed)
    given = settings(pairs=6, prompts=prompts)
    report = profile_cost.run(str(tiny("qwen2_moe")), given, None, force=False)
    (row,) = report.rows
    assert (row["listeners_off"], row["listeners_on"], left) == (0, 1, [0])
    off, on = zip(*row["pairs_ms"], strict=True)
    ratios = [b / a for a, b in row["pairs_ms"]]
    assert (row["tpot_off_ms"], row["tpot_on_ms"]) == (np.median(off), np.median(on))
    assert row["ratio"] == np.median(ratios)
    # Of 32 samples of six, all but one have their median between the least and the most.
    assert (row["ratio_low"], row["ratio_high"]) == (min(ratios), max(ratios))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0}, "pairs is 0"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"memory_budget": "much"}, "memory size 'much' is not understood"),
        ({"run": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_nonsense_is_refused(tiny: Folder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeqError, match=message):
        profile_cost.run(str(tiny("qwen2_moe")), settings(**changes), None, force=False)
