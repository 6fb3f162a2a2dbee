"""The governor's benches: what they run, and how rows follow from it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speq import SpeqError
from speq.bench.replay import governor_sim
from speq.bench.runs import governor
from speq.generator import Generator
from speq.governor.profile import Profile
from speq.models.opened import open_model
from speq.planning import profiles
from speq.stats import StepStats
from tests.helpers.paths import ROUTES
from tests.helpers.told import Told

Folder = Callable[[str], Path]

BUDGET = "2MiB"


def settings(**changes: Any) -> governor.Settings:
    given: dict[str, Any] = {
        "budgets": [BUDGET],
        "draft_lengths": "0,2",
        "prompts": [],
        "num_prompts": 1,
        "max_new_tokens": 12,
        "rounds": 1,
        "run": {"dtype": "float32", "device": "cpu", "profile": "auto"},
    }
    return governor.Settings(**(given | changes))


def test_every_setting_is_run_as_it_is_called(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen2_moe")
    runs: list[tuple[int | None, str, bool, list[StepStats]]] = []
    close = Generator.close

    def closed(self: Generator) -> None:
        config, run = self.runtime.config, self.last_run
        assert run is not None
        drafts = self.runtime.plan.has_draft
        runs.append((config.draft_length, config.profile, drafts, run.decode))
        close(self)

    monkeypatch.setattr(Generator, "close", closed)
    told = Told()
    report = governor.run(str(model), settings(), tmp_path / "found.json", False, told)
    assert told.steps("measuring settings") == len(runs)
    assert [row["draft_length"] for row in report.rows] == ["0", "2", "0, held", "auto"]
    assert [run[:3] for run in runs[:3]] == [
        (0, "none", False),
        (2, "none", True),
        (None, "none", True),
    ]
    assert runs[3][:2] == (None, "none")  # whether it holds a draft is its own choice
    for row, (_, _, _, steps) in zip(report.rows, runs, strict=True):
        spent_s = sum(step.end_s - step.start_s for step in steps)
        assert row["tpot_ms"] == pytest.approx(1e3 * spent_s / 11)
        assert row["draft_length_mean"] == sum(s.draft_length for s in steps) / len(steps)
    plain, two, held, auto = report.rows
    assert plain["draft_length_mean"] == held["draft_length_mean"] == 0 < two["draft_length_mean"]
    assert sum(auto["cycles"].values()) == len(runs[3][3])
    best = min(row["tpot_ms"] for row in (plain, two, held))
    drafting = min(two["tpot_ms"], held["tpot_ms"])
    for row in report.rows:
        assert row["of_best"] == pytest.approx(row["tpot_ms"] / best)
        assert row["of_drafting"] == pytest.approx(row["tpot_ms"] / drafting)
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == report.rows


def test_auto_by_a_profile_runs_beside_auto_without(tiny: Folder, tmp_path: Path) -> None:
    model = tiny("qwen2_moe")
    opened = open_model(model)
    made = Profile(
        profiles.key_of(opened, "cpu", 2 << 20),
        link=((1000.0, 1e9),),
        transfer_overhead_s=0.0,
        first_fetch_s=0.0,
        expert_bytes=1000,
        draft_base_s=0.0,
        draft_token_s=1e-5,
        verify=((1.0, 0.1), (13.0, 0.1)),
        distinct=((1.0, 4.0), (13.0, 12.0)),
    )
    opened.close()
    profiles.write(made, tmp_path / "profile.json")
    by_file = {"dtype": "float32", "device": "cpu", "profile": str(tmp_path / "profile.json")}
    report = governor.run(
        str(model), settings(run=by_file, draft_lengths="0", rounds=2), None, force=False
    )
    assert [row["draft_length"] for row in report.rows] == ["0", "0, held", "auto", "tuned"]
    assert all(row["samples"] == 2 for row in report.rows)
    for row in report.rows:
        assert row["tpot_least_ms"] <= row["tpot_ms"] <= row["tpot_most_ms"]
    # A profile spares the calibration: nothing but the longest drafts there are.
    assert max(map(int, report.rows[3]["cycles"])) >= 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"budgets": ["much"]}, "memory size 'much' is not understood"),
        ({"draft_lengths": "0,x"}, "draft_lengths"),
        ({"budgets": ["1KiB"]}, "memory budget 1 KiB is too small"),
    ],
)
def test_nonsense_is_refused(tiny: Folder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeqError, match=message):
        governor.run(str(tiny("qwen2_moe")), settings(**changes), None, force=False)


def test_simulated_machines_are_judged_and_summed_up(tmp_path: Path) -> None:
    target = tmp_path / "sim.json"
    given = governor_sim.Settings(ROUTES, 2, tokens=40, layers=1, seed=5, processes=1)
    told = Told()
    report = governor_sim.run(replace(given, verdicts=True), target, False, told)
    assert told.steps("simulating") == 2
    assert [verdict["seed"] for verdict in report.verdicts] == [5, 6]
    for verdict in report.verdicts:
        fixed = [time_s for time_s in verdict["fixed_s"].values() if time_s is not None]
        if verdict["best"] is None:
            assert verdict["of_best"] == 1
        else:
            assert verdict["fixed_s"][str(verdict["best"])] == min(fixed)
            assert verdict["of_best"] == pytest.approx(verdict["auto_s"] / min(fixed))
    ratios = [verdict["of_best"] for verdict in report.verdicts]
    (row,) = report.rows
    assert row["worst"] == max(ratios)
    assert row["worst_seed"] == 5 + ratios.index(max(ratios))
    assert row["mean"] == sum(ratios) / 2
    assert row["within_3_percent_of_best"] == sum(ratio <= 1.03 for ratio in ratios) / 2
    written = json.loads(target.read_text())
    assert written["rows"] == report.rows
    assert written["verdicts"] == json.loads(json.dumps(report.verdicts))


@pytest.mark.wide
def test_verdicts_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    given = governor_sim.Settings(ROUTES, 1, tokens=20, layers=1, seed=5, processes=1)
    governor_sim.run(given, tmp_path / "sim.json", force=False)
    written = json.loads((tmp_path / "sim.json").read_text())
    assert (len(written["rows"]), written["verdicts"]) == (1, [])
    # The seeds of all settings, each of which can be drawn again.
    assert (written["settings"]["seed"], written["settings"]["settings"]) == (5, 1)
