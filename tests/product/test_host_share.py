"""Missing experts that the host computes for a device: how many, which, and the same tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speq.engine import host_compute
from speq.errors import Broken
from speq.layers.host_experts import HostExperts
from speq.measure.timeline import trace_events
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.host_share import RETRY, HostShare, ShareRates
from speq.scheduler.stream_transfer import StreamTransfer
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.tiny_models import FAMILIES, UNLIKE_IN_CACHES, greedy_tokens, load_plain

PROMPT, NEW_TOKENS = [7, 3, 200, 41, 9], 16


@dataclass(frozen=True)
class Machine:
    """Bytes a second of a link, of the host's memory, and of the host's kernels by themselves."""

    link: float
    memory: float
    kernels: float


# PCIe 4.0 x16 beside DDR5 in two channels, 5.0 x16 beside faster DDR5, and 3.0 x16 beside DDR4.
MACHINES = [Machine(25e9, 70e9, 62e9), Machine(50e9, 84e9, 75e9), Machine(12.5e9, 42e9, 36e9)]


def simulated_s(machine: Machine, copies: int, computed: int, size: float, trip_s: float) -> float:
    """Seconds of a layer, event by event: copies read the host's memory, and kernels have the rest
    of it meanwhile. Rows go to the host first.
    """
    now_s, link_left, host_left = 0.0, copies * size, computed * size
    begins_s = trip_s / 2 if computed else 0.0
    while link_left > 0 or host_left > 0:
        working = host_left > 0 and now_s >= begins_s
        rest = machine.memory - machine.link if link_left > 0 else machine.memory
        kernels = min(machine.kernels, rest) if working else 0.0
        ends = [link_left / machine.link] if link_left > 0 else []
        ends += [host_left / kernels] if working else []
        ends += [begins_s - now_s] if host_left > 0 and not working else []
        step_s = min(ends)
        now_s += step_s
        link_left = max(link_left - machine.link * step_s, 0.0) if link_left > 1e-3 else 0.0
        host_left = max(host_left - kernels * step_s, 0.0) if host_left > 1e-3 else 0.0
        link_left, host_left = link_left * (link_left > 1e-3), host_left * (host_left > 1e-3)
    return now_s + (trip_s / 2 if computed else 0.0)


def settings(count: int) -> list[tuple[Machine, int, float, float]]:
    rng = random.Random(5)
    return [
        (
            rng.choice(MACHINES),
            rng.randint(1, 40),
            rng.choice([1.5e6, 4.7e6, 9.4e6, 13.2e6, 44e6]),
            rng.uniform(10e-6, 60e-6),
        )
        for _ in range(count)
    ]


def rates_of(machine: Machine, size: float, trip_s: float) -> ShareRates:
    beside = min(machine.kernels, machine.memory - machine.link)
    return ShareRates(size / machine.link, size / beside, size / machine.kernels, trip_s)


def test_the_rule_is_near_the_best_division() -> None:
    near, splits = 0, 0
    for machine, missing, size, trip_s in settings(1000):
        chosen = rates_of(machine, size, trip_s).computed(missing)
        times = [simulated_s(machine, missing - n, n, size, trip_s) for n in range(missing + 1)]
        near += times[chosen] <= 1.03 * min(times)
        splits += 0 < chosen < missing
        # Never later than copying all, by more than that.
        assert times[chosen] <= 1.03 * times[0]
    assert near >= 950
    assert splits > 500


@pytest.mark.parametrize(
    ("rates", "missing", "computed"),
    [
        (ShareRates(1.0, 1.0, 1.0, 0.0), 4, 2),
        (ShareRates(1.0, 3.0, 3.0, 0.0), 4, 1),
        (ShareRates(3.0, 1.0, 1.0, 0.0), 4, 3),
        (ShareRates(1.0, 0.1, 0.1, 2.5), 2, 0),  # the way alone takes longer than both copies
        (ShareRates(1.0, 0.1, 0.1, 2.5), 8, 5),
        (ShareRates(1.0, 9.0, 9.0, 0.0), 1, 0),  # where no split pays
        (ShareRates(9.0, 1.0, 1.0, 0.0), 1, 1),
        (ShareRates(1.0, 1.0, 1.0, 0.0), 0, 0),
        (ShareRates(1.0, 2.0, 0.5, 0.0), 4, 4),  # faster where nothing is copied
        (ShareRates(1.0, 2.0, 1.0, 0.0), 4, 1),
    ],
)
def test_where_a_split_pays(rates: ShareRates, missing: int, computed: int) -> None:
    assert rates.computed(missing) == computed
    assert rates.layer_s(missing - computed, computed) == min(
        rates.layer_s(missing - count, count) for count in range(missing + 1)
    )


def keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def measured(held: Sequence[int] = range(8)) -> HostShare:
    share = HostShare(2, 8, lambda key: key.expert in held)
    share.copied(1.0)
    share.computed(2, 2.0, 0.0)  # one second each
    share.open = True
    return share


def test_rates_beside_copies_and_without_are_measured_apart() -> None:
    share = measured()
    six = keys(0, 1, 2, 3, 4, 5)
    assert len(share.choose(six)) == 3
    for _ in range(60):  # beside three copies, twice as slow
        share.computed(1, 2.0, 0.0)
    assert len(share.choose(six)) == 2
    share.copied(100.0)
    assert len(share.choose(keys(0, 1))) == 2
    for _ in range(60):
        share.computed(2, 0.5, 0.0)  # none was copied
    share.copied(1.0)
    assert len(share.choose(six)) == 6


def test_the_least_used_are_computed() -> None:
    share = measured()
    for experts in ([1, 2], [2, 3], [2, 3]):
        share.visit(0, keys(*experts))
    assert share.choose(keys(1, 2, 3, 0)) == keys(0, 1)
    assert share.by_use(keys(1, 2, 3, 0)) == keys(0, 1, 3, 2)
    assert share.choose(keys(4, 1, layer=1)) == keys(1, layer=1)  # layers have their own counts


def test_only_what_host_memory_holds_is_computed() -> None:
    assert measured(held=[5]).choose(keys(4, 5, 6, 7)) == keys(5)[:0]  # one alone: copied sooner
    assert measured(held=[5, 6]).choose(keys(4, 5, 6, 7)) == keys(5)
    assert measured(held=[]).choose(keys(4, 5)) == []


def test_nothing_is_computed_before_a_copy_was_measured_or_where_it_may_not() -> None:
    share = measured()
    share.open = False
    assert share.choose(keys(1, 2, 3)) == []
    share.open = True
    share.copied(0.0)
    assert share.choose(keys(1, 2, 3)) == []


def test_a_rate_is_learnt_from_one_expert_and_again_after_a_while() -> None:
    share = HostShare(1, 8, lambda key: True)
    share.open = True
    share.copied(1.0)
    assert share.choose(keys(1)) == []
    assert share.choose(keys(1, 2, 3)) == keys(1)
    share.computed(1, 100.0, 0.0)  # far too slow
    for _ in range(RETRY):
        assert share.choose(keys(1, 2, 3)) == []
    assert share.choose(keys(1, 2, 3)) == keys(1)
    assert share.choose(keys(1, 2, 3)) == []
    for _ in range(40):
        share.computed(1, 0.5, 0.0)
    assert share.choose(keys(1, 2, 3)) == keys(1, 2)


def test_a_rate_that_a_profile_knows_is_gone_by_at_once() -> None:
    share = HostShare(1, 8, lambda key: True, expert_s=1.0)
    share.open = True
    share.copied(1.0)
    assert share.choose(keys(1, 2, 3, 4)) == keys(1, 2)


def run(
    cell: Cell, model: Path, draft: str, order: int, prompt: Sequence[int] = PROMPT, **options: Any
) -> Any:
    context = len(prompt) + NEW_TOKENS
    with host_device(HostDevice(order)) as device:
        generator, _ = loaded(cell, model, draft, "float32", context, "cuda", **options)
        result = generator.generate([*prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        run = generator.last_run
        generator.close()
    assert device.pinned == {}
    return result, run


def any_of(rng: random.Random) -> Callable[[HostShare, Sequence[ExpertKey]], list[ExpertKey]]:
    """Any part of a layer's missing experts, where the host may compute some."""

    def choose(share: HostShare, missing: Sequence[ExpertKey]) -> list[ExpertKey]:
        there = [*missing] if share.open else []
        return rng.sample(there, rng.randint(0, len(there)))

    return choose


CELLS = [
    Cell(0, "two slots", "own"),
    Cell(3, "half", "own", prefetch="three-phase"),
    Cell(2, "half", "own", codec="lossless", store="packed", trees="small"),
    Cell(1, "two slots", "own", graphs="none"),
]


@pytest.mark.parametrize(
    ("family", "at"),
    [
        pytest.param(
            family,
            at,
            marks=[]
            if (family, at) == ("qwen3_moe", 2)
            else pytest.mark.wide
            if family in ("gemma4", "gpt_oss")
            else pytest.mark.full,
        )
        for number, family in enumerate(FAMILIES)
        if family in UNLIKE_IN_CACHES or family == "qwen3_moe"
        for at in (range(len(CELLS)) if family == "qwen3_moe" else [number % len(CELLS)])
    ],
)
def test_tokens_do_not_depend_on_the_split(
    family: str, at: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any part of each layer's missing experts, at random."""
    cell, rng = CELLS[at], random.Random(at)
    plain = load_plain(folders.published(family, cell))
    model, draft = folders.of(family, cell)

    monkeypatch.setattr(HostShare, "choose", any_of(rng))
    result, run_stats = run(cell, model, draft, order=at)
    assert result.token_ids == greedy_tokens(plain, PROMPT, NEW_TOKENS)
    assert sum(step.host_experts for step in run_stats.decode) > 0
    assert result.stats["host_experts"] > 0
    without, run_stats = run(cell, model, draft, order=at, host_compute="none")
    assert without.token_ids == result.token_ids
    assert without.stats["host_experts"] == 0


@pytest.mark.parametrize(("length", "cell", "most_rows"), [(40, 0, 64), (150, 2, 64), (40, 0, 1)])
def test_prompts_are_divided_as_far_as_our_kernels_run_them(
    length: int, cell: int, most_rows: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts at random, in each layer and chunk."""
    rng = random.Random(length)
    prompt = [rng.randrange(1, 250) for _ in range(length)]
    model, draft = folders.of("qwen3_moe", CELLS[cell])

    monkeypatch.setattr(HostShare, "choose", any_of(rng))
    monkeypatch.setattr(host_compute, "most_fused_rows", lambda kernels, top_k: most_rows)
    result, run_stats = run(CELLS[cell], model, draft, length, prompt)
    plain = load_plain(folders.published("qwen3_moe", CELLS[cell]))
    assert result.token_ids == greedy_tokens(plain, prompt, NEW_TOKENS)
    prefill = [step for step in run_stats.steps if step.phase == "prefill"]
    assert any(step.host_experts for step in prefill) is (most_rows > 1)
    assert result.stats["host_experts"] > 0


@pytest.mark.wide
def test_all_of_a_layer_may_be_the_hosts(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CELLS[0]
    model, draft = folders.of("qwen3_moe", cell)
    monkeypatch.setattr(
        HostShare, "choose", lambda share, missing: [*missing] if share.open else []
    )
    result, run_stats = run(cell, model, draft, order=1)
    plain = load_plain(folders.published("qwen3_moe", cell))
    assert result.token_ids == greedy_tokens(plain, PROMPT, NEW_TOKENS)
    found = [step for step in run_stats.decode if step.host_experts]
    assert all(any(event.kind == "host" for event in step.events) for step in found)
    lanes = [row["args"].get("name") for row in trace_events(run_stats) if row["ph"] == "M"]
    assert "experts on the host" in lanes


def test_experts_that_nobody_serves_are_an_error(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the processor nothing takes what is left out."""
    cell = CELLS[0]
    model, draft = folders.of("qwen3_moe", cell)
    generator, _ = loaded(cell, model, draft, "float32", len(PROMPT) + NEW_TOKENS)
    loader = generator.runtime.engine.offload.loader
    share = HostShare(100, 100, lambda key: True)
    share.open = True
    monkeypatch.setattr(share, "choose", lambda missing: [*missing])
    loader.share = share
    with pytest.raises(Broken, match="experts were not served"):
        generator.generate(PROMPT, max_new_tokens=4)
    generator.close()


def test_rows_go_to_the_host_before_the_device_waits_for_copies(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind that wait, the host would begin when the copies have ended."""
    cell, log = CELLS[1], list[tuple[str, int]]()
    model, draft = folders.of("qwen3_moe", cell)
    monkeypatch.setattr(
        HostShare, "choose", lambda share, missing: [*missing][::2] if share.open else []
    )

    def noted(kind: str, where: type, name: str, layer_of: Any) -> None:
        whole = getattr(where, name)

        def call(self: Any, *given: Any) -> Any:
            log.append((kind, layer_of(*given)))
            return whole(self, *given)

        monkeypatch.setattr(where, name, call)

    noted("served", ExpertLoader, "serve", lambda layer, *_: layer)
    noted("rows", HostExperts, "begin", lambda rows: -1)
    noted("awaited", StreamTransfer, "wait", lambda ticket: ticket.key.layer)
    noted("computed", HostExperts, "run", lambda layer, *_: layer)
    run(cell, model, draft, order=3)
    found, layer_log = 0, list[str]()
    for kind, _ in log:
        layer_log = [] if kind == "served" else [*layer_log, kind]
        if kind == "computed":
            assert layer_log[0] == "rows"
            found += "awaited" in layer_log
    assert found
