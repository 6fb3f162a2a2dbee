"""What a governor learned, on simulated machines, and in the file that the next run begins with."""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from speq import Generator
from speq.errors import FileError
from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import FixedDraftLength
from speq.governor.learned import LEAST_STEPS, LearnedSteps
from speq.governor.profile import ProfileKey
from speq.planning import profiles
from tests.helpers.draft_machine import Machine, run

KEY = ProfileKey("model", "cpu", 1 << 30, "1")


def learned_on(machine: Machine, steps: int = 200) -> LearnedSteps:
    governor = AdaptiveDraftLength()
    run(governor, machine, steps)
    learned = LearnedSteps.of(KEY, "raw", governor)
    assert learned is not None
    return LearnedSteps.from_entries(json.loads(learned.to_json()), "here")


@pytest.mark.parametrize(
    ("draft_s", "row_s", "share"),
    [(0.7, 0.4, 0.5), (0.1, 0.05, 0.9), (0.05, 0.02, 0.98), (0.9, 0.3, 0.98), (0.3, 0.1, 0.7)],
)
def test_the_next_run_begins_where_the_last_one_ended(
    draft_s: float, row_s: float, share: float
) -> None:
    """Its first 40 steps lose at most half as much against the best length, luck left out."""

    def lost(governor: AdaptiveDraftLength, machine: Machine) -> float:
        lengths = [step.draft_length for step in run(governor, machine, 40)]
        tokens = sum(machine.step_s(k) / machine.token_s(k) for k in lengths)
        best_s = min(machine.token_s(k) for k in range(13))
        return sum(map(machine.step_s, lengths)) / tokens / best_s - 1

    lost_anew = lost_after = 0.0
    for seed in range(4):
        first, anew, after = (Machine(draft_s, row_s, share, seed=seed + at) for at in (0, 10, 10))
        learned = learned_on(first)
        governor = AdaptiveDraftLength(prior=learned.prior)
        learned.teach(governor)
        lost_after += lost(governor, after)
        lost_anew += lost(AdaptiveDraftLength(), anew)
    assert lost_after < 0.5 * lost_anew


def test_a_machine_that_changed_is_learnt_anew() -> None:
    learned = learned_on(Machine(0.05, 0.02, 0.98))
    slow = Machine(0.7, 0.4, 0.5)  # where no draft pays
    governor = AdaptiveDraftLength(prior=learned.prior)
    learned.teach(governor)
    late = run(governor, slow, 80)[40:]
    assert sum(step.draft_length > 0 for step in late) <= 4


def test_too_little_is_not_kept() -> None:
    governor = AdaptiveDraftLength()
    run(governor, Machine(0.1, 0.05, 0.9), int(LEAST_STEPS) // 2)
    assert LearnedSteps.of(KEY, "raw", governor) is None
    assert LearnedSteps.of(KEY, "raw", FixedDraftLength(4)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "speq-governor-0"},
        {"prior": {}},
        {"step_s": [[1, 0.0]]},
        {"step_s": [[1, float("inf")]]},
        {"step_s": "much"},
        {"key": {"model": "m"}},
        {"prior": {"verify": [[1, 1]]}},
        {"prior": {"acceptance": 2.0}},
        {"prior": {"transfer_s": -1.0}},
        {"prior": {"missed": [0.1]}},
        {"prior": {"exposed": ["all", "none"]}},
    ],
    ids=str,
)
def test_files_of_another_form_are_refused(change: dict[str, object]) -> None:
    entries = json.loads(learned_on(Machine(0.1, 0.05, 0.9)).to_json())
    for name, value in change.items():
        whole = isinstance(value, dict) and name == "prior" and value
        entries[name] = entries[name] | value if whole else value
    with pytest.raises(FileError, match=r"^here is no file of format speq-governor-1"):
        LearnedSteps.from_entries(entries, "here")


def test_runs_of_the_same_kind_read_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    governor = AdaptiveDraftLength()
    run(governor, Machine(0.1, 0.05, 0.9), 50)
    assert profiles.read_learned(KEY, "raw") is None
    profiles.keep_learned(KEY, "raw", governor)
    assert profiles.read_learned(KEY, "raw") == LearnedSteps.of(KEY, "raw", governor)
    assert profiles.read_learned(KEY, "lossless") is None
    assert profiles.read_learned(replace(KEY, budget_bytes=1), "raw") is None
    (path,) = tmp_path.rglob("*.governor.json")
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "speq"):
        assert profiles.read_learned(KEY, "raw") is None
    assert caplog.messages[0].startswith(f"the governor learns anew: {path} is not valid JSON")


def test_what_cannot_be_kept_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").write_text("a file where the folder would be")
    monkeypatch.setenv("HOME", str(tmp_path))
    governor = AdaptiveDraftLength()
    run(governor, Machine(0.1, 0.05, 0.9), 50)
    profiles.keep_learned(KEY, "raw", governor)
    assert [each.name for each in tmp_path.iterdir()] == [".cache"]


def test_runs_keep_what_their_governor_learned(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tokens are the same."""
    monkeypatch.setenv("HOME", str(tmp_path))
    answers, files = [], []
    for profile in ("none", "auto", "auto"):
        made = Generator.from_pretrained(
            tiny("qwen3_moe"), memory_budget="64MiB", dtype="float32", profile=profile
        )
        with closing(made) as generator:
            answers.append(generator.generate([1, 2, 3], max_new_tokens=60).token_ids)
        files.append([*tmp_path.rglob("*.governor.json")])
    assert answers[0] == answers[1] == answers[2]
    assert [len(each) for each in files] == [0, 1, 1]
