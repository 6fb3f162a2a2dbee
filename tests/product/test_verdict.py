"""Verdicts of `speq plan`: numbers worked out by hand from the same plans, and kept rates."""

import json
import os
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from speq.errors import SpeqError
from speq.machine import host
from speq.measure import this_machine
from speq.measure.plan import PlannedModel
from speq.measure.settings import PlanSettings
from speq.measure.this_machine import MachineRates, machine_rates
from speq.measure.verdict import Pace, budgets_for, plans_in, rows_of, time_of, verdict_of
from speq.planning import kept_file
from speq.units import parse_bytes
from tests.helpers.command import Command

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
DEEPSEEK = CONFIGS / "DeepSeek-V2-Lite"
GIB = 1 << 30
SETTINGS = PlanSettings(12 * GIB, link=2e9, memory_bandwidth=40e9)


@pytest.fixture(scope="module")
def planned() -> PlannedModel:
    return PlannedModel.of(DEEPSEEK, SETTINGS)


def test_a_verdict_is_what_the_plan_says(planned: PlannedModel, tmp_path: Path) -> None:
    made = planned.plan(12 * GIB)
    verdict = verdict_of(made, None, tmp_path)
    entry = made.to_dict()["best"]
    assert verdict.pace.tokens_per_s == pytest.approx(1e3 / entry["tpot_ms"])
    assert verdict.pace.least == pytest.approx(1e3 / entry["exposed_tpot_ms"])
    assert verdict.pace.most == pytest.approx(1e3 / entry["hidden_tpot_ms"])
    # 26 layers of 64 experts of 3 x 2048 x 1408 weights, 15.7 billion weights in all, in bfloat16.
    assert verdict.model_bytes == pytest.approx(2 * 15.7e9, rel=0.01)
    experts_bytes = 26 * 64 * 3 * 2048 * 1408 * 2
    assert verdict.copy_bytes == pytest.approx(experts_bytes * 11.26 / 16, rel=0.02)
    # What lies in no slot is read once for a prompt.
    absent = 26 * 64 - made.candidates[made.best].slots
    read_s = absent * made.candidates[made.best].moved_bytes / 2e9
    assert verdict.first_token_s == pytest.approx(read_s + entry["tpot_ms"] / 1e3)
    # A slow processor takes longer: 2.4 billion weights that a token runs through, or a few more.
    slow = verdict_of(made, 1e10, tmp_path)
    assert slow.first_token_s == pytest.approx(2 * 2.66e9 * 500 / 1e10, rel=0.1)


def test_what_would_help(planned: PlannedModel) -> None:
    instead = planned.instead()
    assert [*instead] == ["in FP8", "in INT4", "two disks"]
    [row] = rows_of([planned.plan(12 * GIB)], {name: each.plan for name, each in instead.items()})
    for name, link, bits in (("in FP8", 2e9, 8), ("in INT4", 2e9, 4), ("two disks", 4e9, None)):
        made = instead[name].plan(12 * GIB)
        best = made.candidates[made.best]
        assert row.instead[name] == pytest.approx(1 / best.tpot_s)
        assert made.assumptions.link.bandwidth_bytes_per_s == link
        if bits is not None:  # and scales, one for 128 x 128 or for 128 codes
            assert best.moved_bytes == pytest.approx(3 * 2048 * 1408 * bits / 8, rel=0.04)
    assert row.pace.tokens_per_s < row.instead["two disks"]
    assert row.pace.tokens_per_s < row.instead["in FP8"] < row.instead["in INT4"]
    # Codes stay as they are published, and a GPU's link is no disk.
    assert [*instead["in FP8"].instead()] == ["two disks"]
    card = PlannedModel.of(DEEPSEEK, PlanSettings(12 * GIB, preset="rtx-4090"))
    assert [*card.instead()] == ["in FP8", "in INT4"]


def test_sentences(planned: PlannedModel, tmp_path: Path) -> None:
    made = planned.plan(12 * GIB)
    here = verdict_of(made, None, None)
    pace = " to ".join(here.pace.numbers[1:])
    speed = f"about {here.pace.numbers[0]} tokens/s ({pace}) within 12 GiB of memory"
    assert here.sentence.startswith(f"{DEEPSEEK} runs here: {speed}, the first token of a prompt")
    assert here.sentence.endswith("of its experts 19.1 GiB more.")
    roomy = replace(here, free_bytes=100 * GIB)
    assert "would run here: about" in roomy.sentence
    assert roomy.sentence.endswith("100 GiB are free.")
    full = replace(here, free_bytes=here.model_bytes - 3 * GIB)
    assert full.lacks_bytes == 3 * GIB
    assert "does not fit this disk: its files take about 29.3 GiB" in full.sentence
    assert "With 3 GiB more it would run: about" in full.sentence
    times = [time_of(each) for each in (0.024, 0.44, 9.96, 12.4)]
    assert times == ["24 ms", "0.4 s", "10.0 s", "12 s"]


def test_what_is_missing_is_a_verdict_too(command: Command) -> None:
    rates = ("--link", "2GB/s", "--memory-bandwidth", "40GB/s")
    ended = command("plan", DEEPSEEK, "--memory-budget", "1GiB", *rates)
    assert ended.code == 1 and ended.out == ""
    (said,) = ended.err.splitlines()
    assert said.startswith(f"error: {DEEPSEEK} does not run in this memory: memory budget 1 GiB is")
    assert re.search(r"the smallest workable budget is \d+ bytes \(\d\.\d+ GiB\)", said)
    assert re.search(r"; its files take about 29\.3 GiB of disk; [\d.]+ [GT]iB are free$", said)


def test_more_memory_is_never_slower(planned: PlannedModel) -> None:
    made = planned.plan(12 * GIB)
    sizes = budgets_for(made, 64 * GIB)
    assert [size // GIB for size in sizes] == [2, 4, 6, 8, 12, 16, 24]
    assert [size // GIB for size in budgets_for(made, 20 * GIB)] == [2, 4, 6, 8, 12, 16]
    rows = [*rows_of(plans_in(planned.plan, [GIB, *sizes]))]
    # 1 GiB is too little: weights outside the experts take 1.7 GiB, compressed.
    assert [row.budget_bytes for row in rows] == sizes
    for less, more in pairwise(rows):
        assert less.pace.tokens_per_s <= more.pace.tokens_per_s * 1.001
        assert less.cached <= more.cached
    assert rows[-1].cached == 1.0
    # With room for uncompressed matrices beside all experts as well, as a run would hold them.
    (roomy,) = rows_of([planned.plan(48 * GIB)])
    assert roomy.pace.tokens_per_s >= rows[-1].pace.tokens_per_s
    for row in rows:
        assert row.pace.least <= row.pace.tokens_per_s <= row.pace.most


def test_the_command_begins_with_it(command: Command) -> None:
    rates = ("--link", "2GB/s", "--memory-bandwidth", "40GB/s")
    asked = ("plan", str(DEEPSEEK), "--memory-budget", "12GiB", *rates)
    text = command(*asked).out
    assert text.splitlines()[0].startswith(f"{DEEPSEEK} ")
    assert "speed by memory" in text
    found = json.loads(command(*asked, "--json", "-").out)
    best = found["best"]["tpot_ms"]
    assert found["verdict"]["tokens_per_s"] == pytest.approx(1e3 / best)
    chosen = [each for each in found["by_budget"] if each["budget_bytes"] == 12 * GIB]
    assert chosen[0]["tokens_per_s"] == pytest.approx(1e3 / best)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"MEMORY_BYTES": 1 << 20, "DISK_BYTES": 32 << 20, "MATRIX": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(this_machine, name, value)


@pytest.mark.usefixtures("small")
def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = machine_rates()
    assert min(found.memory_bytes_per_s, found.disk_bytes_per_s, found.flops_per_s) > 0
    folder = tmp_path / ".cache" / "speq"
    assert [each.name for each in folder.iterdir()] == [kept_file.NAME]  # the probe is gone
    assert machine_rates() == found
    day = time.strftime("%Y-%m-%d", time.localtime(found.measured_at))
    assert found.rates.source == f"measured on this machine on {day}"


def test_rates_that_do_not_hold_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path, now_s = tmp_path / ".cache" / "speq" / kept_file.NAME, time.time()
    path.parent.mkdir(parents=True)
    anew = MachineRates(1.0, 1.0, 1.0, now_s)
    monkeypatch.setattr(this_machine, "measure", lambda *_: anew)
    good = {"memory_bytes_per_s": 8e9, "disk_bytes_per_s": 1e9, "flops_per_s": 1e11}
    good |= {"measured_at": now_s}

    def told(entry: object, name: str = host(), version: int = kept_file.FORMAT) -> MachineRates:
        path.write_text(json.dumps({"format": version, "surveys": {name: entry}}))
        return machine_rates()

    assert told(good) == MachineRates(8e9, 1e9, 1e11, now_s)
    assert told(good, "another") == told(good, version=2) == told([]) == anew
    for wrong in (
        {"measured_at": now_s - 40 * 86_400},
        {"measured_at": now_s + 86_400},
        {"disk_bytes_per_s": 0},
        {"disk_bytes_per_s": "fast"},
        {"flops_per_s": None},
        {"flops_per_s": 10**400},
    ):
        assert told(good | wrong) == anew
    path.write_text("{")
    assert machine_rates() == anew
    assert told(good) != anew
    path.unlink()
    assert machine_rates() == anew


@pytest.mark.usefixtures("small")
def test_a_disk_that_cannot_be_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpeqError, match=r"No space left on device; give --link and"):
        this_machine.measure(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_paces_have_their_bounds_in_order(planned: PlannedModel) -> None:
    for plan in planned.plan(parse_bytes("16GiB")).candidates:
        pace = Pace.of(plan)
        assert 0 < pace.least <= pace.tokens_per_s <= pace.most


def test_a_model_that_is_here_is_planned_whatever_the_cache_folders_disk(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(progress: object) -> None:
        raise SpeqError("the disk is full")

    monkeypatch.setattr("speq.measure.plan.machine_rates", full)
    settings = PlanSettings(26 << 20, context_length=256, profile="none")
    planned = PlannedModel.of(bundled, settings)
    assert planned.is_here
    assert planned.flops_per_s is None
    assert verdict_of(planned.plan(26 << 20), planned.flops_per_s, None).pace.tokens_per_s > 0
    with pytest.raises(SpeqError, match="the disk is full"):
        PlannedModel.of(DEEPSEEK, PlanSettings(12 * GIB))


def test_a_run_says_what_it_expects_with_its_range(
    command: Command, bundled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--memory-budget", "32MiB", "--prompt", "one", "--max-new-tokens", 2)
    assert command("generate", bundled, *arguments).code == 0
    said = caplog.text
    pace = r"about ([\d.,]+) ms per token expected \(([\d.,]+) tokens/s, ([\d.,]+) to ([\d.,]+)\)"
    found = re.search(pace, said)
    assert found is not None, said
    ms, expected, least, most = (float(each.replace(",", "")) for each in found.groups())
    assert least <= expected <= most
    assert 1e3 / ms == pytest.approx(expected, rel=0.1)  # both have two digits
