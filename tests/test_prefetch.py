"""When the draft's routes are acted on, and what becomes of what was fetched for them."""

import random

import pytest
import torch

from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache, ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.lookahead_policy import LookaheadPolicy
from speq.scheduler.policies import LruPolicy
from speq.scheduler.prefetch import QUEUE, DraftGuided, Mode, OnDemand
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.fake_transfer import FakeTransfer

LAYERS, EXPERTS = 3, 12


class Rig:
    """A prefetcher over transfers that take place when the test says so."""

    def __init__(self, mode: Mode, slots: int = 30, rng: random.Random | None = None) -> None:
        self.transfer = FakeTransfer(rng)
        self.recorder = Recorder()
        self.policy = LookaheadPolicy(slots, LAYERS, EXPERTS)
        self.supply = ExpertSupply(ExpertCache(slots, self.policy), self.transfer, self.recorder)
        self.prefetcher = DraftGuided(self.supply, LookaheadBuffer(LAYERS), mode)

    def draft(self, token: int, layer: int, weights: dict[int, float]) -> list[ExpertKey]:
        """What a draft's route has asked for that was not before."""
        before = len(self.transfer.asked)
        route = Route(torch.tensor([list(weights)]), torch.tensor([list(weights.values())]), None)
        self.prefetcher.request(token, layer, route)
        assert {p for _, p in self.transfer.asked[before:]} <= {Priority.PREFETCH}
        return [key for key, _ in self.transfer.asked[before:]]


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_three_phases() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(6)
    # The first third names and fetches nothing.
    assert rig.draft(0, 0, {1: 0.7, 2: 0.3}) == []
    assert rig.draft(1, 0, {1: 0.6, 3: 0.4}) == []
    # Then what is likely: named twice, or with its share of the weight.
    assert rig.draft(2, 0, {4: 0.9, 5: 0.1}) == keys(0, 1, 4)
    rig.transfer.end_all()
    assert rig.draft(3, 1, {7: 0.2, 8: 0.8}) == keys(1, 8)
    rig.transfer.end_all()
    # Then everything, the nearest layer first.
    assert rig.draft(4, 1, {9: 0.5, 7: 0.5}) == [*keys(0, 2, 3, 5), *keys(1, 7, 9)]


def test_single_sooner_and_later_act_once() -> None:
    for mode, acts_at in ((Mode.SINGLE_SOONER, 0), (Mode.SINGLE_LATER, 2)):
        rig = Rig(mode)
        rig.prefetcher.begin(3)
        named: list[ExpertKey] = []
        for token in range(3):
            for layer in range(LAYERS):
                named += keys(layer, token, token + 1)
                asked = rig.draft(token, layer, {token: 0.5, token + 1: 0.5})
                if (token, layer) == (acts_at, LAYERS - 1):
                    assert sorted(asked) == sorted(set(named))
                else:
                    assert asked == []


def test_only_so_many_are_under_way() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(3)
    rig.draft(2, 0, {expert: 1 / EXPERTS for expert in range(EXPERTS)})
    assert rig.supply.under_way == QUEUE
    rig.transfer.end_all()
    rig.supply.land()
    rig.draft(2, 1, {0: 1.0})
    assert len(rig.transfer.asked) == EXPERTS + 1


def test_verification_goes_on_prefetching_and_gives_up_what_has_passed() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.transfer.depth = 1
    rig.prefetcher.begin(1)
    for layer in range(LAYERS):
        rig.prefetcher.request(
            0, layer, Route(torch.tensor([[1, 2, 3]]), torch.ones(1, 3) / 3, None)
        )
    assert rig.transfer.asked == []  # one token is all priming
    waves = rig.prefetcher.serve(0, [1])
    assert dict(next(waves)).keys() == {1}
    # Its own first, then the layers behind it, none of its own that it did not want.
    assert rig.transfer.asked == [
        (ExpertKey(0, 1), Priority.DEMAND),
        *((key, Priority.PREFETCH) for layer in (1, 2) for key in keys(layer, 1, 2, 3)),
    ]
    assert list(waves) == []
    step = rig.recorder.step
    assert (step.requests, step.hits, step.late) == (1, 0, 0)
    # Layer 1 wants one of what is on its way; the others of it that have not begun are given up.
    assert [set(wave) for wave in rig.prefetcher.serve(1, [2])] == [{2}]
    assert (step.requests, step.hits, step.late) == (2, 0, 1)
    under_way = set(rig.transfer.open_keys)
    assert not any(key.layer == 1 for key in under_way - set(rig.transfer.begun))
    assert {ExpertKey(2, expert) for expert in (1, 2, 3)} <= under_way | {
        key for key in keys(2, 1, 2, 3) if key in rig.supply.cache
    }


def test_what_is_evicted_unused_is_wasted() -> None:
    rig = Rig(Mode.THREE_PHASE, slots=2)
    rig.prefetcher.begin(3)
    rig.draft(2, 0, {1: 0.5, 2: 0.5})
    rig.transfer.end_all()
    list(rig.prefetcher.serve(0, [1]))  # the other was named for nothing
    list(rig.prefetcher.serve(1, [4]))
    list(rig.prefetcher.serve(2, [5]))
    assert rig.recorder.step.wasted == 1
    assert ExpertKey(0, 2) not in rig.supply.cache


@pytest.mark.parametrize("mode", [None, *Mode])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
@pytest.mark.parametrize("slots", [1, 2, 5, 13, 36])
def test_every_verification_is_served(mode: Mode | None, policy: str, slots: int) -> None:
    """Random drafts, right and wrong, over transfers that end when they like."""
    rng = random.Random(slots)
    transfer, recorder = FakeTransfer(rng), Recorder()
    of_slots = (
        LruPolicy(slots, LAYERS) if policy == "lru" else LookaheadPolicy(slots, LAYERS, EXPERTS)
    )
    supply = ExpertSupply(ExpertCache(slots, of_slots), transfer, recorder)
    lookahead = LookaheadBuffer(LAYERS)
    prefetcher = (
        OnDemand(supply, lookahead) if mode is None else DraftGuided(supply, lookahead, mode)
    )
    for _ in range(60):
        length = rng.randint(0, 5)
        prefetcher.begin(length)
        named: list[set[int]] = [set() for _ in range(LAYERS)]
        for token in range(length):
            for layer in range(LAYERS):
                ids = rng.sample(range(EXPERTS), 3)
                named[layer] |= set(ids)
                prefetcher.request(
                    token, layer, Route(torch.tensor([ids]), torch.full((1, 3), 1 / 3), None)
                )
        for layer in range(LAYERS):
            wanted = {e for e in named[layer] if rng.random() < 0.8} | {rng.randrange(EXPERTS)}
            seen: list[int] = []
            for wave in prefetcher.serve(layer, sorted(wanted)):
                for expert, slot in wave.items():
                    assert transfer.contents[slot] == ExpertKey(layer, expert)
                seen += wave
            assert sorted(seen) == sorted(wanted)
    cache = supply.cache
    assert cache.free_slots + len(cache) + supply.under_way == slots
    prefetched = sum(priority is Priority.PREFETCH for _, priority in transfer.asked)
    if mode is None:
        assert prefetched == 0
    elif slots > LAYERS:
        assert prefetched > 0
