"""Experts of a second device: the same tokens, in whatever order both devices work."""

from pathlib import Path
from typing import Any

import pytest
import torch

from speq.devices.device import Processor
from speq.devices.named import find_second
from speq.engine.second_compute import SecondCompute
from speq.errors import Broken, DeviceError, NoRoom, OptionError
from speq.loading.second_slots import spread
from speq.routing import Route
from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.second_device import SecondDevice
from speq.stats import Recorder
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.fake_transfer import FakeTransfer
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.host_tensors import SECOND
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT, NEW_TOKENS = [7, 3, 200, 41, 9], 16
SLOTS = 1 << 20  # bytes that hold some experts of each layer, of a few tens of kilobytes


def run(cell: Cell, model: Path, draft: str, order: int, **options: Any) -> Any:
    context = len(PROMPT) + NEW_TOKENS
    with host_device(HostDevice(order), HostDevice(order + 1, on=SECOND)):
        generator, _ = loaded(cell, model, draft, "float32", context, "cuda", **options)
        result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        run = generator.last_run
        generator.close()
    return result, run


CELLS = [
    Cell(0, "two slots", "own"),
    Cell(3, "half", "own", prefetch="three-phase"),
    Cell(2, "half", "own", codec="lossless", store="packed", trees="small"),
]


@pytest.mark.parametrize("host_compute", ["none", pytest.param("auto", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("family", "at"),
    [
        ("qwen3_moe", 0),
        ("qwen3_moe", 1),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.wide),
        pytest.param("gpt_oss", 1, marks=pytest.mark.wide),
    ],
)
def test_tokens_do_not_depend_on_a_second_device(
    family: str, at: int, host_compute: str, folders: Folders
) -> None:
    cell = CELLS[at]
    plain = load_plain(folders.published(family, cell))
    model, draft = folders.of(family, cell)
    given = {"second_budget": SLOTS, "host_compute": host_compute}
    result, run_stats = run(cell, model, draft, order=at, **given)
    assert result.token_ids == greedy_tokens(plain, PROMPT, NEW_TOKENS)
    assert 0 < result.stats["memory"]["second_slots"] <= SLOTS
    on_second = sum(step.second_experts for step in run_stats.decode)
    assert result.stats["second_experts"] == on_second > 0
    assert sum(step.second_experts for step in run_stats.steps) == on_second  # prompts: the first
    alone, _ = run(cell, model, draft, order=at, host_compute=host_compute)
    assert alone.token_ids == result.token_ids
    assert alone.stats["second_experts"] == 0 and "second_slots" not in alone.stats["memory"]
    # They are neither loaded nor missing.
    assert result.stats["moved_bytes"] < alone.stats["moved_bytes"]
    assert result.stats["hit_rate"] > alone.stats["hit_rate"]


def test_slots_are_spread_over_layers() -> None:
    assert spread(7, 3, 8) == {
        ExpertKey(layer, expert): 2 * layer + expert for layer in range(3) for expert in range(2)
    }
    assert len(spread(100, 3, 8)) == 24
    assert spread(2, 3, 8) == {}


def test_a_layer_takes_what_is_there_where_it_may() -> None:
    asked: list[tuple[int, dict[int, int]]] = []
    second = SecondDevice(spread(4, 2, 8))
    keys = [ExpertKey(1, expert) for expert in (0, 1, 5)]
    assert second.take(1, keys) == set()
    second.launch = lambda layer, slots: asked.append((layer, slots))
    assert second.take(1, keys) == {*keys[:2]}
    assert second.take(1, keys[2:]) == set()
    assert asked == [(1, {0: 2, 1: 3})]


def test_a_second_device_there_is_not() -> None:
    with pytest.raises(DeviceError, match="the run is on the CPU; a second GPU helps a first one"):
        find_second(Processor())


def test_one_gpu_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(DeviceError, match="torch sees one GPU alone, cuda:0"):
        find_second(HostDevice())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda at: (9, 0))
    assert find_second(HostDevice()).torch == SECOND
    assert find_second(HostDevice(on=SECOND)).torch.index == 0


def test_the_second_gpu_is_of_the_capability_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(8, 9), (9, 0), (8, 9)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda at: capabilities[at])
    assert find_second(HostDevice()).torch.index == 2
    capabilities[2] = (8, 6)
    with pytest.raises(DeviceError, match=r"cuda:0 of 8\.9 and cuda:1 of 9\.0, whose results"):
        find_second(HostDevice())


def test_experts_that_nothing_served_are_told_of() -> None:
    """Without a host nothing would write their outputs."""
    loader = ExpertLoader(ExpertCache(2, LruPolicy(2, 1, 4)), FakeTransfer(), Recorder())
    unused: Any = None
    second = SecondCompute(unused, spread(2, 1, 4), loader, Recorder(), None)
    route = Route(torch.tensor([[0, 3]]), torch.ones(1, 2))
    with pytest.raises(Broken, match="experts were not served"):
        second.run(0, route, [3], torch.empty(1, 2, 8))


@pytest.mark.parametrize("budget", [1, 1 << 50])
def test_too_little_and_more_than_there_is_are_refused(budget: int, folders: Folders) -> None:
    model, draft = folders.of("qwen3_moe", CELLS[0])
    with pytest.raises(NoRoom, match="one expert of each layer takes"):
        run(CELLS[0], model, draft, order=0, second_budget=budget)


def test_records_over_a_draft_stay_on_the_first_device(folders: Folders) -> None:
    cell = Cell(2, "half", "own", codec="residual", store="packed")
    model, draft = folders.of("qwen3_moe", cell)
    with pytest.raises(OptionError, match="which the first GPU has"):
        run(cell, model, draft, order=0, second_budget=SLOTS)
