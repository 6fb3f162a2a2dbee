"""Experts of further devices: the same tokens, in whatever order all devices work."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from speq.config import RunConfig
from speq.devices.device import Processor
from speq.devices.named import find_peers
from speq.engine.host_compute import HostCompute
from speq.engine.peer_compute import PeerCompute
from speq.errors import Broken, DeviceError, NoRoom, OptionError, SpeqError
from speq.layers.expert_counts import ExpertCounts
from speq.loading.peer_slots import held_experts
from speq.options.declared import build
from speq.planning.cost.peers import Peers, dealt
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.used_experts import UsedExperts
from speq.routing import Route
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.peer_devices import PeerDevices, PeerSlot
from speq.stats import Recorder
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.host_tensors import SECOND, THIRD
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT, NEW_TOKENS = [7, 3, 200, 41, 9], 16
SLOTS = (1 << 20,)  # bytes that hold some experts of each layer, of a few tens of kilobytes


def run(
    cell: Cell, model: Path, draft: str, order: int, prompt: list[int] = PROMPT, **options: Any
) -> Any:
    context = len(prompt) + NEW_TOKENS
    peers = HostDevice(order + 1, on=SECOND), HostDevice(order + 2, on=THIRD)
    with host_device(HostDevice(order), *peers):
        generator, _ = loaded(cell, model, draft, "float32", context, "cuda", **options)
        result = generator.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        run = generator.last_run
        generator.close()
    return result, run


CELLS = [
    Cell(0, "two slots", "own"),
    Cell(3, "half", "own", prefetch="three-phase"),
    Cell(2, "half", "own", codec="lossless", store="packed", trees="small"),
    Cell(5, "half", "own", prefetch="three-phase", trees="pruned"),
]


@pytest.mark.parametrize("host_compute", ["none", pytest.param("auto", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("family", "at", "count"),
    [
        ("qwen3_moe", 0, 1),
        ("qwen3_moe", 1, 2),
        pytest.param("qwen3_moe", 2, 2, marks=pytest.mark.wide),
        pytest.param("qwen3_moe", 3, 2, marks=pytest.mark.wide),
        pytest.param("gpt_oss", 1, 2, marks=pytest.mark.wide),
    ],
)
def test_tokens_do_not_depend_on_further_devices(
    family: str, at: int, count: int, host_compute: str, folders: Folders
) -> None:
    cell = CELLS[at]
    plain = load_plain(folders.published(family, cell))
    model, draft = folders.of(family, cell)
    given = {"peer_budget": count * SLOTS, "host_compute": host_compute}
    result, run_stats = run(cell, model, draft, order=at, **given)
    assert result.token_ids == greedy_tokens(plain, PROMPT, NEW_TOKENS)
    assert 0 < result.stats["memory"]["peer_slots"] <= count * SLOTS[0]
    on_peers = sum(step.peer_experts for step in run_stats.decode)
    assert result.stats["peer_experts"] == on_peers > 0
    assert sum(step.peer_experts for step in run_stats.steps) > on_peers  # of the prompt too
    alone, _ = run(cell, model, draft, order=at, host_compute=host_compute)
    assert alone.token_ids == result.token_ids
    assert alone.stats["peer_experts"] == 0 and "peer_slots" not in alone.stats["memory"]
    # They are neither loaded nor missing.
    assert result.stats["moved_bytes"] < alone.stats["moved_bytes"]
    assert result.stats["hit_rate"] > alone.stats["hit_rate"]


@pytest.mark.parametrize("policy", ["truncate", pytest.param("substitute", marks=pytest.mark.wide)])
def test_a_budget_chooses_the_same_experts_beside_further_devices(
    policy: str, folders: Folders
) -> None:
    """If those in slots are ranked as all others: experts that are left out run nowhere."""
    cell = Cell(5, "half", "own", prefetch="three-phase", trees="large")
    model, draft = folders.of("qwen3_moe", cell)
    given = {"expert_budget": 3, "expert_policy": policy, "expert_residents": "ranked"}
    alone, _ = run(cell, model, draft, order=3, **given)
    result, run_stats = run(cell, model, draft, order=3, peer_budget=2 * SLOTS, **given)
    assert result.token_ids == alone.token_ids
    assert result.stats["budget"] == alone.stats["budget"]
    assert result.stats["budget"]["dropped_share"] > 0
    assert sum(step.peer_experts for step in run_stats.decode) > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_tokens_do_not_depend_on_which_experts_lie_where(
    seed: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they where the rows of a prompt, all at once, go through experts one at a time."""
    cell = Cell(3, "all", "own")
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(100)]
    plain = load_plain(folders.published("qwen3_moe", cell))
    model, draft = folders.of("qwen3_moe", cell)
    held: list[list[ExpertKey]] = [[], []]

    def anywhere(plan: Any, peers: Peers, used: UsedExperts) -> list[list[ExpertKey]]:
        for layer in () if any(held) else range(used.num_layers):
            experts = rng.sample(range(used.num_experts), used.num_experts - 1)
            split = rng.randrange(len(experts))
            for keys, part in zip(held, (experts[:split], experts[split : split + 3]), strict=True):
                keys += [ExpertKey(layer, expert) for expert in part]
        return held

    monkeypatch.setattr("speq.load.held_experts", anywhere)
    monkeypatch.setattr(Peers, "most_rows", lambda *of: len(prompt))
    given = {"peer_budget": 2 * (1 << 26,), "host_compute": "none"}
    result, run_stats = run(cell, model, draft, seed, prompt, **given)
    assert result.token_ids == greedy_tokens(plain, prompt, NEW_TOKENS)
    by_step = [step.peer_experts for step in run_stats.steps]
    assert by_step[0] == sum(map(len, held)) and sum(by_step[1:]) > 0


def test_experts_used_most_are_dealt_to_all() -> None:
    """Each GPU has its share of the ranks, the larger one more of them."""
    assert dealt([2, 2], [7, 5, 3, 1, 0]) == [[7, 3], [5, 1]]
    assert dealt([3, 1], [7, 5, 3, 1, 0]) == [[7, 5, 1], [3]]
    assert dealt([0, 2], [7, 5, 3]) == [[], [7, 5]]


def test_what_is_held_fits_and_is_used_most() -> None:
    counts = ExpertCounts("a model", 10, 2, [[1, 9, 8, 2], [10, 0, 4, 6]])
    used = UsedExperts(2, 4, counts)
    assert used.shares == pytest.approx((0, 19 / 40, 33 / 40, 39 / 40, 1))
    assert UsedExperts(2, 4).shares == (0, 0.25, 0.5, 0.75, 1)
    peers = Peers((4 * 64 + 5, 2 * 64), 100, used.shares, 2, 16)
    assert peers.room(64, 2) == (2, 1)
    assert peers.room(32, 2) == (1, 2)  # the first GPU keeps one
    plan = ResidencyPlan("raw", "none", 64, 60, 60, slots=4, peers=(1, 1))
    first, second = held_experts(plan, peers, used)
    assert first == [(0, 1), (1, 0)] and second == [(0, 2), (1, 3)]
    # 120 bytes of experts, over rows and results of 16 bytes each, there and back.
    assert peers.most_rows(plan.peers, plan.moved_bytes) == int(120 / (2 * 16 * (1 + 2 * 33 / 40)))
    with pytest.raises(NoRoom, match=r"leaves 128 B of further GPU 2 .* one of each layer"):
        held_experts(replace(plan, slot_bytes=65), peers, used)
    many = replace(peers, slots_bytes=(1 << 30,) * 4)
    with pytest.raises(OptionError, match=r"4 further GPUs, and a layer has 4 .* name 3 at most"):
        held_experts(plan, many, used)


def test_a_layer_takes_what_is_there_where_it_may() -> None:
    asked: list[tuple[int, dict[int, PeerSlot]]] = []
    held = {ExpertKey(1, 0): PeerSlot(0, 2), ExpertKey(1, 1): PeerSlot(1, 3)}
    devices = PeerDevices(held, 64)
    keys = [ExpertKey(1, expert) for expert in (0, 1, 5)]
    assert devices.take(1, keys) == set()
    devices.launch = lambda layer, slots: asked.append((layer, slots))
    assert devices.take(1, keys) == {*keys[:2]}
    assert devices.take(1, keys[2:]) == set()
    assert asked == [(1, {0: PeerSlot(0, 2), 1: PeerSlot(1, 3)})]


def test_further_devices_there_are_not() -> None:
    assert find_peers(Processor(), 0) == []
    with pytest.raises(DeviceError, match="the run is on the CPU; further GPUs help a first one"):
        find_peers(Processor(), 1)


def test_further_gpus_are_of_the_kind_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [("A", (8, 9)), ("B", (9, 0)), ("A", (8, 9)), ("A", (8, 6)), ("A", (8, 9))]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(kinds))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda at: kinds[at][0])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda at: kinds[at][1])
    assert [peer.torch.index for peer in find_peers(HostDevice(), 1)] == [2]
    assert [peer.torch.index for peer in find_peers(HostDevice(), 2)] == [2, 4]
    with pytest.raises(DeviceError, match=r"3 further GPUs like cuda:0 \(A, 8\.9\).*torch sees 2"):
        find_peers(HostDevice(), 3)
    del kinds[1:]
    with pytest.raises(DeviceError, match="torch sees 0, beside it: none"):
        find_peers(HostDevice(), 1)


def test_experts_that_nothing_served_are_told_of() -> None:
    """Without a host nothing would write their outputs."""
    devices = PeerDevices({ExpertKey(0, 1): PeerSlot(0, 0)}, 64)
    compute = PeerCompute([], devices, Recorder(), None)
    route = Route(torch.tensor([[0, 3]]), torch.ones(1, 2))
    with pytest.raises(Broken, match="experts were not served"):
        compute.run(0, route, [3], torch.empty(1, 2, 8))


class Host:
    """Notes what it is given, and writes ones."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def allowed(self, hidden_states: torch.Tensor, route: Route) -> Any:
        return nullcontext()

    def run(self, layer: int, route: Route, experts: Any, outputs: torch.Tensor) -> None:
        self.given += experts
        outputs[torch.isin(route.host_ids, torch.tensor(experts))] = 1


def test_a_host_computes_what_devices_hold_and_were_not_asked_for() -> None:
    """Of more rows than devices may have they launch nothing, though they hold the expert."""
    devices = PeerDevices({ExpertKey(0, 1): PeerSlot(0, 0)}, most_rows=2)
    host, recorder = Host(), Recorder()
    compute = PeerCompute([], devices, recorder, cast("HostCompute", host))
    for rows, given in ((3, [1, 3]), (2, [3])):
        host.given.clear()
        before = recorder.step.peer_experts
        route = Route(torch.tensor([[1, 3]] * rows), torch.ones(rows, 2))
        outputs = torch.zeros(rows, 2, 8)
        with compute.allowed(torch.ones(rows, 8), route):
            devices.take(0, [ExpertKey(0, 1), ExpertKey(0, 3)])
            compute.run(0, route, [1, 3], outputs)
        assert host.given == given
        assert bool((outputs[:, 2 - len(given) :] == 1).all())
        assert recorder.step.peer_experts - before == 2 - len(given)


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ("1KiB", "one of each layer takes"),
        ("1MiB,1KiB", "leaves 0 B of further GPU 2"),
        ("1MiB,1024TiB", "peer_budget gives 1024 TiB of cuda:2, which has 1 TiB free"),
    ],
)
def test_too_little_and_more_than_there_is_are_refused(
    budget: str, sentence: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded."""
    monkeypatch.delattr("speq.models.moe_model.load")
    cell = Cell(0, "all", "own")
    model, draft = folders.of("qwen3_moe", cell)
    with pytest.raises(NoRoom, match=sentence):
        run(cell, model, draft, order=0, peer_budget=budget)


def test_records_over_a_draft_stay_on_the_first_device(folders: Folders) -> None:
    cell = Cell(2, "half", "own", codec="residual", store="packed")
    model, draft = folders.of("qwen3_moe", cell)
    with pytest.raises(OptionError, match="which the first GPU has"):
        run(cell, model, draft, order=0, peer_budget=SLOTS)


@pytest.mark.parametrize("value", ["8GiB,", "many", 8 << 30, [None]])
def test_sizes_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(SpeqError):
        build(RunConfig, {"peer_budget": value})


def test_sizes_are_of_each_gpu_in_turn() -> None:
    assert build(RunConfig, {"peer_budget": "8GiB, 6GiB"}).peer_budget == (8 << 30, 6 << 30)
    assert build(RunConfig, {}).peer_budget == ()
