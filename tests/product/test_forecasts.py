"""What was expected of runs beside what came: kept, read, shown."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from speq import Generator
from speq.governor.roofline import StepEstimate
from speq.planning import forecasts
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.forecasts import LEAST_TOKENS, MOST_RUNS, ForecastRun, SteadyTime, way_of
from speq.stats import RunStats, StepStats
from tests.helpers.command import Command
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.host_tensors import SECOND
from tests.helpers.paths import BUNDLED

KEPT = Path(".cache/speq/forecasts.json")
WAY = "raw without a draft"
RUN = ForecastRun("a-model", WAY, 12 << 30, 0.4, 0.25, 0.3, 0.5, 0.5, 64, 1_700_000_000)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(home: Path, content: object) -> None:
    (home / KEPT).parent.mkdir(parents=True, exist_ok=True)
    (home / KEPT).write_text(json.dumps(content))


def test_second_halves_of_texts_are_measured() -> None:
    run, steady = RunStats(0.0, {}), SteadyTime()
    for at, (emitted, seconds, sequences) in enumerate(
        [(1, 9.0, 1), (1, 9.0, 1), (1, 9.0, 1), (2, 0.5, 1), (8, 1.0, 2), (1, 0.25, 1)]
    ):
        step = StepStats("decode", sequences=sequences, emitted=emitted)
        run.steps.append(replace(step, start_s=float(at), end_s=at + seconds))
    run.steps.insert(0, replace(StepStats("prefill", emitted=1), start_s=0.0, end_s=100.0))
    steady.add(run)
    assert (steady.seconds, steady.tokens) == (0.75, 3)


def test_a_run_is_kept_beside_the_others(home: Path) -> None:
    assert forecasts.kept() == []
    step = StepEstimate(0, tokens=2.0, draft_s=0.0, verify_s=0.5, new_s=0.25, exposed=0.5)
    # None is near another one, which would correct it.
    sizes = [round(1000 * 1.26**at) for at in range(MOST_RUNS + 3)]
    for at, size in enumerate(sizes):
        steady = SteadyTime(0.01 * (LEAST_TOKENS + at), LEAST_TOKENS + at)
        forecasts.keep("some/model", WAY, size, step, step, steady)
    runs = forecasts.kept()
    assert [run.budget_bytes for run in runs] == sizes[3:]
    last = runs[-1]
    assert (last.model, last.tokens) == ("model", LEAST_TOKENS + MOST_RUNS + 2)
    assert math.isclose(last.measured_s, 0.01)
    assert (last.hidden_s, last.expected_s, last.exposed_s) == (0.25, step.token_s, 0.375)
    # Too few tokens.
    forecasts.keep("few", WAY, 1, step, step, SteadyTime(9.0, LEAST_TOKENS - 1))
    assert forecasts.kept() == runs


def vars_of(run: ForecastRun) -> dict[str, object]:
    return {name: getattr(run, name) for name in run.__slots__}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"format": 3, "runs": []},
        {"format": 2},
        {"format": 2, "runs": [{}]},
        {"format": 2, "runs": [vars_of(RUN) | {"expected_s": 0}]},
        {"format": 2, "runs": [vars_of(RUN) | {"measured_s": "fast"}]},
        {"format": 2, "runs": [vars_of(RUN) | {"tokens": -1}]},
    ],
)
def test_a_damaged_file_is_none(
    content: object, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(home, content)
    assert forecasts.kept() == []
    assert str(home / KEPT) in caplog.text and "anew" in caplog.text


def test_an_older_format_is_left_out_silently(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(home, {"format": 1, "runs": [vars_of(RUN)]})
    assert forecasts.kept() == [] and not caplog.records


def test_ways_of_other_devices_drafters_and_reads_are_apart() -> None:
    plan = ResidencyPlan("raw", "none", 1, 1, 1)
    copied = replace(plan, encoded=True, encode_s=0.1, copied_share=0.5)
    plans = [
        *(plan, replace(plan, drafter="ngram"), replace(plan, drafter="int4")),
        *(copied, replace(copied, copied_share=0.0)),
    ]
    ways = [way_of(*way) for way in product(plans, (True, False), (True, False))]
    assert len({*ways}) == len(ways) and way_of(plan, True, False) == WAY


def test_they_are_shown(home: Path, command: Command) -> None:
    shown = command("plan", "--accuracy")
    assert shown.code == 0 and "No run of this machine is kept yet" in shown.out
    slow = replace(RUN, model="another", measured_s=0.7)
    write(home, {"format": 2, "runs": [vars_of(RUN), vars_of(slow)]})
    told = json.loads(command("plan", BUNDLED, "--accuracy", "--json", "-").out)
    assert [round(run["off"], 9) for run in told["runs"]] == [0.25, 0.75]
    shown = command("plan", BUNDLED, "--accuracy")
    assert "+25%" in shown.out and "+75%" in shown.out and "another" in shown.out
    assert "Runs: 2. Half were off by 50% or less; 1 lay between from and to." in shown.out


@pytest.mark.wide
def test_a_run_says_what_came_of_its_forecast(home: Path, command: Command) -> None:
    text = ("generate", BUNDLED, "--prompt", "The sea", "--max-new-tokens", "48", "--ignore-eos")
    text = *text, "--codec", "raw", "--dense", "raw"  # else surveys may differ
    done = command(*text, "--memory-budget", "32MiB")
    assert done.code == 0, done.err
    (run,) = forecasts.kept()
    assert run.model == BUNDLED.name and run.budget_bytes == 32 << 20
    assert (
        run.hidden_s <= run.expected_s == run.planned_s <= run.exposed_s and 20 <= run.tokens <= 28
    )
    assert 0 < run.measured_s < 60
    for options in (("--draft-length", "2"), ("--profile", "none")):
        assert command(*text, *options, "--memory-budget", "32MiB").code == 0
    assert len(forecasts.kept()) == 1
    # The next run expects about what this one took.
    assert command(*text, "--memory-budget", "33MiB").code == 0
    _, second = forecasts.kept()
    came = run.measured_s / run.planned_s
    # Variances: 0.09 before any run, 0.01 of drift, and 0.01 of the run itself.
    far = abs(math.log(came)) > 2 * math.sqrt(0.09 + 0.01)
    ratio = came if far else came ** (0.10 / 0.11)
    assert math.isclose(second.expected_s / second.planned_s, ratio)


def test_a_run_whose_budget_changed_is_not_kept(home: Path) -> None:
    """It was planned for another one."""
    generator = Generator.from_pretrained(BUNDLED, "32MiB")
    generator.generate("The sea", max_new_tokens=48, ignore_eos=True)
    generator.resize("30MiB")
    generator.generate("The sea", max_new_tokens=48, ignore_eos=True)
    generator.close()
    assert forecasts.kept() == []


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"device": "cpu", "sums": "fast"}, 1),
        ({"device": "cpu", "sums": "canonical"}, 0),
        ({"device": "cpu", "graphs": "none"}, 0),
        ({"device": "cpu", "profile": "none"}, 0),
        ({"device": "cuda"}, 1),
        ({"device": "cuda", "peer_budget": "1MiB"}, 0),
    ],
)
def test_runs_unlike_others_correct_none(
    options: dict[str, Any], kept: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with slower options, or of further GPUs."""
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(forecasts, "keep", lambda *run: told.append(run))
    machines = host_device(HostDevice(), HostDevice(on=SECOND))
    with machines if options["device"] == "cuda" else nullcontext():
        Generator.from_pretrained(BUNDLED, "64MiB", **options).close()
    assert len(told) == kept


def test_runs_correct_what_is_expected_of_others(home: Path) -> None:
    runs = [
        replace(RUN, measured_s=1.0),  # 4 times as long as planned
        replace(RUN, measured_s=0.5),
        replace(RUN, budget_bytes=16 << 30, measured_s=0.75),
        replace(RUN, model="another", measured_s=5.0),
        replace(RUN, way="lossless without a draft", measured_s=0.25),
    ]
    write(home, {"format": 2, "runs": [vars_of(run) for run in runs]})
    # Near 12 GiB, from 10 to 14, the last run there says most.
    near = [forecasts.correction("some/a-model", WAY, size << 30) for size in (12, 10, 14)]
    assert near == pytest.approx([2.0, 2.0, 3.0], rel=0.15) and near[0] == near[1] != near[2]
    assert forecasts.correction("a-model", WAY, 20 << 30) == 3  # off by more than chance
    assert [forecasts.correction("a-model", WAY, size << 30) for size in (9, 32)] == [1, 1]
    assert forecasts.correction("a-model-2", WAY, 12 << 30) == 1
    alike = forecasts.correction("a-model", "lossless without a draft", 12 << 30)
    assert alike == pytest.approx(1) != 2


@pytest.mark.wide
def test_a_plan_of_this_machine_is_corrected(home: Path, command: Command) -> None:
    def ratio(*options: str) -> float:
        """Of the speed that is told to the one that is planned."""
        text = ("plan", BUNDLED, "--memory-budget", "32MiB", "--json", "-", *options)
        told = json.loads(command(*text).out)
        (row,) = [row for row in told["by_budget"] if row["budget_bytes"] == 32 << 20]
        assert row["tokens_per_s"] == told["verdict"]["tokens_per_s"]
        return float(row["tokens_per_s"] * told["best"]["tpot_ms"] / 1e3)

    rates = "--link", "1GB/s", "--memory-bandwidth", "20GB/s"
    assert math.isclose(ratio(), 1) and math.isclose(ratio(*rates), 1)
    run = replace(RUN, model=BUNDLED.name, budget_bytes=32 << 20, measured_s=1.0)
    write(home, {"format": 2, "runs": [vars_of(run)]})
    assert math.isclose(ratio(), 1 / 4)
    assert math.isclose(ratio(*rates), 1) and math.isclose(ratio("--profile", "none"), 1)
    assert "took 4.00 of the time planned" in command("plan", BUNDLED, "--memory-budget=32MiB").out
