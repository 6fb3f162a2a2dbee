"""How many threads read experts: the fewest that are enough, by a survey that is kept."""

import json
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speq import Generator, RunConfig, SpeqError
from speq.config import DEFAULT_READER_THREADS
from speq.experts.expert_store import Buffers
from speq.governor.profile import Profile, ProfileKey
from speq.measure.plan import PlannedModel
from speq.measure.settings import PlanSettings
from speq.models.opened import open_model
from speq.planning import profiles, reader_survey
from speq.planning.cost import presets
from speq.planning.reader_survey import ROUNDS, SURVEY_S, fewest_that_do, reader_threads, survey
from tests.helpers.command import Command

Folder = Callable[[str], Path]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({2: 2.32, 3: 2.4, 4: 2.5, 6: 2.55, 8: 2.65}, 6),  # 4 reach 94 % of the best
        ({2: 3.75, 3: 3.81, 4: 3.90, 8: 3.92}, 2),
        ({2: 1.0, 3: 1.5, 4: 2.0}, 4),
        ({2: 0.95, 4: 1.0}, 2),
        ({2: 0.949, 4: 1.0}, 4),
        ({2: 2.0, 4: 1.0, 8: 0.5}, 2),
    ],
)
def test_as_few_threads_as_are_enough(rates: Mapping[int, float], wanted: int) -> None:
    assert fewest_that_do(rates) == wanted


def test_numbers_of_threads_take_turns() -> None:
    now_s, asked = 0.0, []

    def rate(count: int, sample: int) -> float:
        nonlocal now_s
        asked.append(count)
        assert sample == len(asked) - 1
        now_s += SURVEY_S / 100
        return [1.0, 9.0, 3.0][(len(asked) - 1) // 3] * count

    assert survey(rate, (2, 3, 4), lambda: now_s) == {2: 6.0, 3: 9.0, 4: 12.0}  # medians
    assert asked == [2, 3, 4, 3, 4, 2, 4, 2, 3]


def test_a_slow_disk_is_surveyed_once() -> None:
    now_s, asked = 0.0, []

    def rate(count: int, sample: int) -> float:
        nonlocal now_s
        asked.append(count)
        now_s += SURVEY_S / 2
        return 1.0

    assert survey(rate, (2, 4), lambda: now_s) == {2: 1.0, 4: 1.0}
    assert asked == [2, 4]


@dataclass
class Disk:
    """A store of experts on a disk that gives constructed rates."""

    file: Path
    rates: Mapping[int, float]
    expert_bytes: int = 20 * MIB
    slot_bytes: int = 4096
    reading_bytes: int = 0
    published: bool = False
    num_layers: int = 4
    num_experts: int = 32
    asked: list[int] = field(default_factory=list)

    @property
    def codec(self) -> SimpleNamespace:
        return SimpleNamespace(slot_bytes=self.slot_bytes)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self.expert_bytes


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A machine of 8 cores whose home is empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(reader_survey, "processors", lambda: 8)

    def rate(store: Disk, slots: list[Any], *_: object) -> float:
        store.asked.append(len(slots))
        assert all(slot.nbytes == store.slot_bytes and not slot.any() for slot in slots)
        return store.rates[len(slots)]

    monkeypatch.setattr(reader_survey, "link_bytes_per_s", rate)
    (tmp_path / "experts.bin").touch()
    return Disk(tmp_path / "experts.bin", {2: 1e9, 3: 1.5e9, 4: 1.98e9, 6: 2e9, 8: 1.9e9})


def chosen(disk: Any, budget_bytes: int = 1 << 40) -> int:
    return reader_threads(disk, budget_bytes, clock=lambda: 0.0)


def test_a_survey_is_kept(disk: Disk, tmp_path: Path) -> None:
    assert chosen(disk) == 4
    assert sorted(disk.asked) == sorted([2, 3, 4, 6, 8] * ROUNDS)
    disk.asked.clear()
    assert chosen(disk) == 4 and disk.asked == []
    (path,) = (tmp_path / ".cache" / "speq").iterdir()
    content = json.loads(path.read_text())
    (entry,) = content["surveys"].values()
    assert entry["rates"] == {"2": 1e9, "3": 1.5e9, "4": 1.98e9, "6": 2e9, "8": 1.9e9}
    # Another size, another form, and another disk are surveyed beside it.
    disk.expert_bytes, disk.rates = 30 * MIB, dict.fromkeys(disk.rates, 1.0)
    assert chosen(disk) == 2 and disk.asked
    disk.published = True
    disk.rates = dict(disk.rates) | {8: 2.0}
    assert chosen(disk) == 8
    assert len(json.loads(path.read_text())["surveys"]) == 3
    disk.asked.clear()
    disk.expert_bytes, disk.published = 20 * MIB, False
    assert chosen(disk) == 4 and disk.asked == []


@pytest.mark.parametrize(
    "fault", ["old", "later", "host", "rate", "long", "format", "json", "list"]
)
def test_a_survey_that_does_not_hold_is_made_again(
    fault: str, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(disk)
    (path,) = (tmp_path / ".cache" / "speq").iterdir()
    content = json.loads(path.read_text())
    (entry,) = content["surveys"].values()
    if fault == "old":
        entry["measured_at"] = time.time() - 31 * 86_400
    elif fault == "later":
        entry["measured_at"] = time.time() + 86_400
    elif fault == "host":
        monkeypatch.setattr(reader_survey, "host", lambda: "another")
    elif fault == "rate":
        entry["rates"]["2"] = 0
    elif fault == "long":
        entry["rates"]["2"] = 10**400  # more than any float
    elif fault == "format":
        content["format"] = 2
    elif fault == "list":
        content["surveys"] = []
    path.write_text("{" if fault == "json" else json.dumps(content))
    disk.asked.clear()
    assert chosen(disk) == 4 and disk.asked
    disk.asked.clear()
    assert chosen(disk) == 4 and disk.asked == []


def test_a_survey_that_cannot_be_kept_is_made_each_time(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    for _ in range(2):
        disk.asked.clear()
        assert chosen(disk) == 4 and disk.asked


def test_what_is_small_is_not_surveyed(disk: Disk) -> None:
    disk.expert_bytes = MIB
    assert chosen(disk) == DEFAULT_READER_THREADS and disk.asked == []


def test_no_more_threads_than_cores_or_memory(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.rates = {2: 1e9, 3: 2e9, 4: 3e9, 6: 4e9, 8: 5e9}
    # A budget of ten slots: half of it is five.
    assert chosen(disk, 10 * disk.slot_bytes) == 4 and max(disk.asked) == 4
    assert chosen(disk) == 8  # fewer were surveyed
    monkeypatch.setattr(reader_survey, "processors", lambda: 2)
    disk.asked.clear()
    assert chosen(disk) == 4 and disk.asked == []
    monkeypatch.setattr(reader_survey, "processors", lambda: 6)
    assert chosen(disk) == 6
    # Buffers of a thread count as its slot does.
    disk.reading_bytes = disk.slot_bytes
    disk.expert_bytes += MIB
    assert chosen(disk, 12 * disk.slot_bytes) == 3 and max(disk.asked) == 3
    # Experts so large that two take all the room are read by two, without a survey.
    disk.asked.clear()
    disk.slot_bytes = 256 * MIB
    assert chosen(disk) == 2 and disk.asked == []


def test_a_survey_leaves_no_buffers(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(reader_survey, "processors", lambda: 8)
    monkeypatch.setattr(reader_survey, "LEAST_BYTES", 1)
    counted: list[Buffers] = []
    allocate = Buffers.allocate

    def allocated(nbytes: int) -> Buffers:
        counted.append(allocate(nbytes))
        return counted[-1]

    monkeypatch.setattr(Buffers, "allocate", allocated)
    with closing(open_model(tiny("olmoe"))) as opened:
        assert chosen(opened.store) in (2, 3, 4, 6, 8) and counted
        left = [weakref.ref(each.ends) for each in counted]
        counted.clear()
        assert [each() for each in left] == [None] * len(left)


def load(model: Path, **options: Any) -> Generator:
    return Generator.from_pretrained(model, "20MiB", draft="none", profile="none", **options)


def test_a_run_reads_with_what_was_chosen(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def five(store: Any, budget_bytes: int, progress: object) -> int:
        asked.append((store.num_experts, budget_bytes))
        return 5

    monkeypatch.setattr("speq.load.reader_threads", five)
    model = tiny("olmoe")
    generator = load(model)
    assert asked == [(generator.runtime.opened.store.num_experts, 20 * MIB)]
    assert generator.runtime.readers == 5
    transfer = generator.runtime.engine.offload.loader._transfer
    assert len(transfer._readers) == 5  # type: ignore[attr-defined]
    run = generator.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True)
    assert run.stats["reader_threads"] == 5
    generator.close()
    generator = load(model, reader_threads=3)  # a number is not surveyed
    assert generator.runtime.readers == 3 and len(asked) == 1
    generator.close()


def test_a_plan_counts_them(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seven(*_: object) -> int:
        asked.append(7)
        return 7

    monkeypatch.setattr("speq.measure.plan.reader_threads", seven)
    settings = PlanSettings(26 * MIB, context_length=256)
    assert PlannedModel.of(bundled, settings).readers == 7
    key, file = ProfileKey("model", "cpu", 1 << 20, "1"), tmp_path / "profile.json"
    made = Profile(key, ((1000.0, 1e6),), 0.0, 0.0, 1000, 0.0, 0.0, ((1.0, 0.01),))
    profiles.write(made, file)
    with monkeypatch.context() as patch:
        patch.setattr(profiles, "read_kept", lambda _: made)
        assert PlannedModel.of(bundled, settings).readers == 7 and len(asked) == 2
    # Where rates are another machine's, this one's disk is not surveyed.
    for options in (
        {"link": 1e9, "memory_bandwidth": 1e10},
        {"link": 1e9},
        {"preset": presets.DEFAULT_CARD},
        {"profile": str(file)},
    ):
        planned = PlannedModel.of(bundled, replace(settings, **options))
        assert planned.readers == DEFAULT_READER_THREADS
    gpu = SimpleNamespace(torch=SimpleNamespace(type="cuda"))
    monkeypatch.setattr("speq.measure.plan.find_device", lambda _: gpu)
    planned = PlannedModel.of(bundled, replace(settings, profile="none"))
    assert not planned.on_cpu and planned.readers == DEFAULT_READER_THREADS
    assert len(asked) == 2


def test_the_option_is_a_number_or_auto() -> None:
    for given, held in (("auto", None), (None, None), ("4", 4), (64, 64)):
        assert RunConfig.of(reader_threads=given).reader_threads == held
    assert RunConfig.of().reader_threads is None
    for wrong in ("many", 0, 65, "2.5"):
        with pytest.raises(SpeqError, match="reader_threads is"):
            RunConfig.of(reader_threads=wrong)


def test_the_command_says_how_many(bundled: Path, command: Command) -> None:
    shared = ("--prompt", "Once", "--memory-budget", "64MiB", "--max-new-tokens", 2)
    ended = command("generate", bundled, *shared, "--reader-threads", 3)
    assert ended.code == 0
    (line,) = [line for line in ended.err.splitlines() if "reader threads" in line]
    assert line.split("│")[-2].split() == ["3"]
    refused = command("generate", bundled, *shared, "--reader-threads", "many")
    assert refused.code != 0 and "auto or a whole number" in refused.err
