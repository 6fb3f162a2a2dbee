"""What is surveyed of a machine is kept, and runs correct it."""

import json
import math
import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speq.devices.device import Processor
from speq.governor.roofline import StepEstimate
from speq.models.opened import open_model
from speq.planning import kept_file, trials
from speq.planning.assumptions import Assumptions
from speq.planning.cost.estimate import Estimate
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey
from speq.planning.demand import Budget
from speq.planning.forecasts import LEAST_TOKENS, SteadyTime
from speq.planning.kept_survey import LEAST_MOVED_BYTES, KeptSurvey, MachineSurvey
from speq.planning.layer_trial import layer_bytes
from speq.planning.link_trial import TURNS, LinkRates

SURVEY = Survey(
    *("cpu", 1e9, 2e10, 0.001, 0.0002),
    row_s=0.0001,
    miss_s=0.0003,
    expert_s={"raw": 0.0004, "lossless": 0.0005},
    draft_expert_s=0.0001,
    draft_layer_s=0.0002,
    encode_bytes_per_s={"raw": 1e9, "lossless": 2e9},
    link_slows=1.5,
    compute_slows=1.25,
    spread=0.3,
)
KEPT = Path(".cache/speq") / kept_file.NAME


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


class Machine:
    """A machine that is surveyed as it is just now."""

    def __init__(self, survey: Survey) -> None:
        self.survey_now, self.asked = survey, 0

    def survey(self, codecs: Iterable[str]) -> Survey:
        self.asked += 1
        return replace(self.survey_now, expert_s=dict.fromkeys(codecs, 0.0004))


def survey_of(machine: Any, key: str | None = "key") -> MachineSurvey:
    return MachineSurvey(machine, key)


def plan_of(link_bytes_per_s: float) -> ResidencyPlan:
    """A token computes for 40 ms and moves 200 MB."""
    step = StepEstimate(0, 1.0, 0.0, 0.04, 2e8 / link_bytes_per_s, 2e8)
    return ResidencyPlan("raw", "none", 1, 1, 1, expected=step)


def run_of(compute_s: float, link_bytes_per_s: float, tokens: int = 32) -> SteadyTime:
    """A run of the same plan on a machine that is otherwise."""
    link_s = tokens * 2e8 / link_bytes_per_s
    total_s = tokens * compute_s + link_s
    return SteadyTime(total_s, tokens, tokens * compute_s, link_s, tokens * 200_000_000)


def test_a_survey_is_kept_and_told_alike(home: Path) -> None:
    machine = Machine(SURVEY)
    first = survey_of(machine).survey(["raw"])
    machine.survey_now = replace(SURVEY, link_bytes_per_s=3e9)
    assert survey_of(machine).survey(["raw"]) == first and machine.asked == 1
    # Another codec is surveyed, and those that were known beside it.
    assert survey_of(machine).survey(["lossless"]).expert_s.keys() == {"raw", "lossless"}
    assert survey_of(machine).survey(["raw"]).expert_s.keys() == {"raw", "lossless"}
    assert machine.asked == 2
    # A small model's is not kept.
    assert survey_of(machine, None).survey(["raw"]).link_bytes_per_s == 3e9
    assert machine.asked == 3


def test_what_is_kept_is_read_as_it_was(home: Path) -> None:
    kept = KeptSurvey(
        replace(SURVEY, measured_at=int(time.time())), Estimate(2e9, 0.25), Estimate(1.5, 0.125)
    )
    kept.keep("key")
    read = kept_file.read("key", KeptSurvey.of)
    assert read == kept
    now = kept.now
    assert (now.link_bytes_per_s, now.memory_bytes_per_s, now.spread) == (2e9, 2e10 / 1.5, 0.25)
    assert now.expert_s == {"raw": 0.0004 * 1.5, "lossless": 0.0005 * 1.5}
    assert now.encode_bytes_per_s["raw"] == 1e9 * (1 / 1.5)
    times = "pass_s", "layer_s", "row_s", "miss_s", "draft_expert_s", "draft_layer_s"
    assert all(getattr(now, name) == 1.5 * getattr(SURVEY, name) for name in times)


@pytest.mark.parametrize(
    "fault",
    [
        {"survey": {}},
        {"survey": []},
        {"survey": asdict(SURVEY) | {"layer_s": -1}},
        {"survey": asdict(SURVEY) | {"layer_s": "soon"}},
        {"survey": asdict(SURVEY) | {"memory_bytes_per_s": 0}},
        *({"survey": asdict(SURVEY) | {name: 0}} for name in ("link_slows", "compute_slows")),
        {"survey": asdict(SURVEY) | {"link_slows": 0.5}},
        {"survey": asdict(SURVEY) | {"link_bytes_per_s": 0}},
        {"survey": asdict(SURVEY) | {"encode_bytes_per_s": {"raw": 0}}},
        {"survey": asdict(SURVEY) | {"expert_s": 1}},
        {"survey": asdict(SURVEY) | {"pass_s": 10**400}},
        {"survey": asdict(SURVEY) | {"another": 1}},
        {"link": {"value": 0, "spread": 1}},
        {"link": 1e9},
        {"compute": {"value": 1}},
        {"measured_at": "now"},
        {"measured_at": 0},
    ],
)
def test_damaged_surveys_are_made_again(fault: dict[str, Any], home: Path) -> None:
    machine = Machine(SURVEY)
    survey_of(machine).survey(["raw"])
    content = json.loads((home / KEPT).read_text())
    content["surveys"]["key"] |= fault
    (home / KEPT).write_text(json.dumps(content))
    assert survey_of(machine).survey(["raw"]).link_bytes_per_s == pytest.approx(1e9)
    assert machine.asked == 2


@pytest.mark.parametrize("slower", [0.3, 0.45, 0.8, 1.0, 1.3, 2.4])
@pytest.mark.parametrize("longer", [0.6, 0.8, 1.0, 1.25, 1.4])
def test_after_one_run_a_forecast_is_within_15_percent(
    slower: float, longer: float, home: Path
) -> None:
    """Whatever the survey met: reads at `slower` and computing for `longer` times what runs do."""
    true_link, true_s = 1e9, 0.04
    machine = Machine(replace(SURVEY, link_bytes_per_s=slower * true_link))
    surveyed = survey_of(machine)
    before = surveyed.survey(["raw"])
    planned = plan_of(before.link_bytes_per_s)
    step = planned.step._replace(verify_s=longer * true_s)
    seen = surveyed.learn(replace(planned, expected=step), run_of(true_s, true_link))
    assert (seen.verify_s, seen.new_s) == pytest.approx((true_s, 2e8 / true_link))
    after = survey_of(machine).survey(["raw"])
    assert abs(after.link_bytes_per_s / true_link - 1) < 0.15
    told_s = longer * true_s * before.memory_bytes_per_s / after.memory_bytes_per_s
    assert abs(told_s / true_s - 1) < 0.15
    assert machine.asked == 1


def test_another_survey_leaves_what_runs_saw_of_the_link(home: Path) -> None:
    machine = Machine(SURVEY)
    surveyed = survey_of(machine)
    surveyed.survey(["raw"])
    surveyed.learn(plan_of(1e9), run_of(0.4, 2e9))
    machine.survey_now = replace(SURVEY, link_bytes_per_s=5e8, memory_bytes_per_s=4e9)
    after = survey_of(machine).survey(["raw", "lossless"])
    assert (after.link_bytes_per_s, after.memory_bytes_per_s) == pytest.approx((2e9, 4e9))


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (run_of(0.05, 2e9, LEAST_TOKENS - 1), set()),  # too few tokens
        (replace(run_of(0.05, 2e9), moved_bytes=LEAST_MOVED_BYTES - 1), {"compute"}),
        (replace(run_of(0.05, 2e9), drafted=1), {"link"}),
        (run_of(0.05, 2e9), {"link", "compute"}),
    ],
)
def test_a_run_tells_what_it_saw(run: SteadyTime, changes: set[str], home: Path) -> None:
    surveyed = survey_of(Machine(SURVEY))
    surveyed.survey(["raw"])
    before = kept_file.read("key", KeptSurvey.of)
    surveyed.learn(plan_of(1e9), run)
    after = kept_file.read("key", KeptSurvey.of)
    assert (
        after is not None
        and before is not None
        and after.survey.measured_at == before.survey.measured_at
    )
    found = {name for name in ("link", "compute") if getattr(after, name) != getattr(before, name)}
    assert found == changes
    # What a run saw was beside the other.
    assert after.survey.link_slows == (1.0 if "link" in changes else SURVEY.link_slows)
    assert after.survey.compute_slows == (1.0 if "compute" in changes else SURVEY.compute_slows)


def test_what_encodes_as_it_reads_tells_no_speed(home: Path) -> None:
    surveyed = survey_of(Machine(SURVEY))
    before = surveyed.survey(["raw"])
    plan = replace(plan_of(1e9), encoded=True)
    assert surveyed.learn(plan, run_of(0.08, 3e9)) == plan.step
    assert survey_of(Machine(SURVEY)).survey(["raw"]) == before


def test_a_survey_of_another_process_is_left_as_it_is(home: Path) -> None:
    surveyed = survey_of(Machine(SURVEY))
    surveyed.survey(["raw"])
    KeptSurvey.new(replace(SURVEY, pass_s=0.5)).keep("key")
    before = kept_file.read("key", KeptSurvey.of)
    surveyed.learn(plan_of(1e9), run_of(0.05, 2e9))
    assert kept_file.read("key", KeptSurvey.of) == before


def test_runs_of_one_survey_learn_whichever_ends_first(home: Path) -> None:
    served, short = survey_of(Machine(SURVEY)), survey_of(Machine(SURVEY))
    for surveyed in (served, short):
        surveyed.survey(["raw"])
    short.learn(plan_of(1e9), run_of(0.04, 2e9))
    served.learn(plan_of(1e9), run_of(0.04, 4e9))
    after = survey_of(Machine(SURVEY)).survey(["raw"])
    assert after.link_bytes_per_s == pytest.approx(4e9, rel=0.1)


def test_a_kept_survey_says_its_day() -> None:
    shape: Any = SimpleNamespace(experts=SimpleNamespace(num_experts=64), top_k=6)
    told = Assumptions.of_survey(replace(SURVEY, measured_at=1_700_000_000), shape).source
    assert told.startswith("measured on this machine on 2023-11-1")
    assert "just now" in Assumptions.of_survey(SURVEY, shape).source


def test_estimates_follow_a_disk_whose_speed_drifts() -> None:
    """The interval of 80 % holds the next run's rate in most cases, and narrows."""
    rng, inside, off = random.Random(5), 0, []
    rate = 1e9
    estimate = Estimate(rate * math.exp(rng.gauss(0, 0.3)), 0.3)
    for _ in range(400):
        rate *= math.exp(rng.gauss(0, 0.1))
        seen = rate * math.exp(rng.gauss(0, 0.1))
        apart = abs(math.log(seen / estimate.value))
        inside += apart <= 1.28 * math.hypot(estimate.spread, 0.1, 0.1)
        off.append(apart)
        estimate = estimate.with_run(seen)
        assert 0.05 < estimate.spread < 0.4
    assert 0.72 * 400 <= inside <= 0.9 * 400
    assert sum(off) / len(off) < 0.15


def test_what_a_run_contradicts_is_forgotten() -> None:
    slow = Estimate(4e8, 0.2)
    assert slow.contradicts(1e9) and not slow.contradicts(6e8)
    found = slow.with_run(1e9)
    assert found.value == 1e9
    assert found.spread == pytest.approx(math.log(2.5) / 2)
    # Two that agree make the interval narrower; two apart, less so.
    alike, apart = slow.with_run(4e8), slow.with_run(5.5e8)
    assert alike.spread < apart.spread < slow.spread


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_reads_and_kernels_are_timed_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of 100 bytes take a second alone and two beside a kernel, which takes a tenth alone
    and an eighth of a second beside them.
    """
    clock, reading = Clock(), SimpleNamespace(left=0)

    class Pool:
        """Runs what is submitted while the caller's kernels do."""

        def __init__(self, count: int) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, read: Any, sample: int) -> Any:
            reading.left, rate = 16, read(sample, True)
            return SimpleNamespace(done=lambda: not reading.left, result=lambda: rate)

    monkeypatch.setattr("speq.planning.link_trial.ThreadPoolExecutor", Pool)
    samples = []

    def link(sample: int, beside: bool = False) -> float:
        samples.append(sample)
        clock.now_s += 0.0 if beside else 1.0
        return (50.0 if beside else 100.0) * (1 + 0.01 * (sample // 2))

    def kernel() -> None:
        beside = reading.left > 0
        reading.left -= beside
        clock.now_s += 0.125 if beside else 0.1

    found = LinkRates.of(link, kernel, clock)
    assert samples == list(range(2 * TURNS))
    assert found.bytes_per_s == pytest.approx(101) and found.link_slows == pytest.approx(2)
    assert found.compute_slows == pytest.approx(1.25)
    assert found.spread == pytest.approx(0.01, rel=0.05)


def test_the_shorter_of_two_slows_the_longer() -> None:
    step = StepEstimate(0, 1.0, 0.0, 1.0, 4.0)
    assert step.overlapped_s == 4.0  # nothing is taken from each other
    # While both run, reads get half: 2 seconds of kernels leave 3 of reads.
    assert step._replace(link_slows=2.0, compute_slows=2.0).overlapped_s == step.serial_s == 5.0
    assert step._replace(link_slows=1.25, compute_slows=1.0).overlapped_s == pytest.approx(4.2)
    # They do not take longer than in turns, and what is alone takes no longer.
    slow = step._replace(link_slows=3.0, compute_slows=3.0)
    assert slow.overlapped_s == slow.serial_s == 5.0
    assert slow._replace(new_s=0.0).overlapped_s == 1.0
    other = step._replace(verify_s=4.0, new_s=1.0, compute_slows=1.25)
    assert other.overlapped_s == pytest.approx(4.2)


def test_a_range_is_as_wide_as_speeds_vary() -> None:
    step = StepEstimate(0, 2.0, 0.0, 1.0, 4.0, exposed=0.5)
    assert step.range_s == (2.0, 2.5)
    least_s, most_s = step._replace(spread=0.25).range_s
    assert (least_s, most_s) == pytest.approx((2 / math.exp(0.32), 2.5 * math.exp(0.32)))
    held = StepEstimate(0, 1.0, 0.0, 1.0, spread=0.25)
    assert held.range_s[0] < held.token_s < held.range_s[1]


def test_a_survey_without_room_for_a_layer_is_not_kept(
    tiny_bfloat16: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LEAST_BYTES", 1)
    with closing(open_model(tiny_bfloat16("qwen2_moe"))) as opened:
        spec: Any = SimpleNamespace(dtype=torch.bfloat16, draft=None)

        def key(budget_bytes: int) -> str | None:
            budget = Budget.of(budget_bytes, None, True, opened.shape)
            return trials.machine_survey(opened, Processor(), spec, budget).key

        least = 2 * layer_bytes(opened, torch.bfloat16)
        assert key(least) is not None and key(least - 2) is None
