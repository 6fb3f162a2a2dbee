"""Eviction policies against a few lines each, written from what they say of themselves."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from speq import Generator
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.registries import CACHE_POLICIES
from speq.scheduler.eviction import (
    RECENCY,
    EntropyPolicy,
    EvictionPolicy,
    KeepAllPolicy,
    LfuPolicy,
    LookaheadPolicy,
    LruPolicy,
)
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from tests.helpers.smallest import two_slot_budget
from tests.helpers.tiny_models import greedy_tokens, load_plain


def all_keys(layers: int, experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for layer in range(layers) for expert in range(experts)]


class Past:
    """What happened so far: visits of each layer, and when each resident was last used."""

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.visits: list[list[list[int]]] = [[] for _ in range(layers)]
        self.used: dict[ExpertKey, int] = {}
        self.now = 0

    def random_step(self, rng: random.Random, policy: EvictionPolicy) -> None:
        """Something happens, to the policy and here."""
        self.now += 1
        layer = rng.randrange(self.layers)
        turn = rng.random()
        if turn < 0.4:
            wanted = rng.sample(range(self.experts), rng.randint(1, min(3, self.experts)))
            policy.visit(layer, wanted)
            self.visits[layer].append(wanted)
        elif turn < 0.85:
            key = ExpertKey(layer, rng.randrange(self.experts))
            policy.touch(key)
            self.used[key] = self.now
        elif self.used:
            key = rng.choice(sorted(self.used))
            policy.forget(key)
            del self.used[key]

    def least_recently_used(self, layer: int | None) -> list[ExpertKey]:
        keys = [key for key in self.used if layer in (None, key.layer)]
        return sorted(keys, key=lambda key: self.used[key])

    def aged(self, key: ExpertKey) -> float:
        """How many visits wanted it, each counting less by RECENCY with every one since."""
        count = 0.0
        for wanted in self.visits[key.layer]:
            count *= 1 - RECENCY
            if key.expert in wanted:
                count += RECENCY
        return count

    def shares(self, layer: int) -> list[float]:
        """Of the layer's recent choices, each expert's; all alike to begin with."""
        shares = [1 / self.experts] * self.experts
        for wanted in self.visits[layer]:
            shares = [share * (1 - RECENCY) for share in shares]
            for expert in wanted:
                shares[expert] += RECENCY / len(wanted)
        return shares

    def spread(self, layer: int) -> float:
        """The exponential of the entropy: n for n equal shares."""
        return math.prod(share**-share for share in self.shares(layer) if share)


def check_who_goes(policy: EvictionPolicy, past: Past, order: list[ExpertKey]) -> None:
    """order: who is expected to go first, of all layers."""
    for layer in range(past.layers):
        own = [key for key in order if key.layer == layer]
        assert list(policy.candidates(layer)) == own
        # A prefetch finds the same: it takes none of another layer's.
        assert list(policy.candidates(layer, ahead=True)) == own
        assert list(policy.candidates(None, ahead=True)) == []
    assert list(policy.candidates(None)) == order


def test_lfu_lets_go_who_was_wanted_least() -> None:
    rng = random.Random(1)
    for _ in range(15):
        layers, experts = rng.randint(1, 4), rng.randint(2, 7)
        policy, past = LfuPolicy(9, layers, experts), Past(layers, experts)
        for _ in range(80):
            past.random_step(rng, policy)
            # Among equals, and at first all are, the least recently used.
            order = sorted(past.least_recently_used(None), key=past.aged)
            check_who_goes(policy, past, order)


def test_lfu_forgets_what_was_wanted_long_ago() -> None:
    policy = LfuPolicy(4, 1, 3)
    for expert in range(3):
        policy.touch(ExpertKey(0, expert))
    for _ in range(50):
        policy.visit(0, [0])
    for _ in range(20):
        policy.visit(0, [1, 2])
    # 0: 50 visits long ago, (1 - 0.97^50) x 0.97^20 = 0.43; 1 - 0.97^20 = 0.46 of late.
    assert [key.expert for key in policy.candidates(0)] == [0, 1, 2]


def test_entropy_shares_follow_the_spread() -> None:
    rng = random.Random(2)
    differ = 0
    for _ in range(40):
        layers, experts = rng.randint(1, 5), rng.randint(2, 9)
        slots = rng.randint(2 * layers, 2 * layers * experts)
        policy, past = EntropyPolicy(slots, layers, experts), Past(layers, experts)
        # Each layer keeps to some of its experts.
        kept = [rng.sample(range(experts), rng.randint(1, experts)) for _ in range(layers)]
        for _ in range(rng.randint(40, 90)):
            for layer in range(layers):
                wanted = rng.sample(kept[layer], rng.randint(1, len(kept[layer])))
                policy.visit(layer, wanted)
                past.visits[layer].append(wanted)
        quotas = [policy.quota(layer) for layer in range(layers)]
        assert sum(quotas) == slots
        spreads = [past.spread(layer) for layer in range(layers)]
        half = slots // layers // 2
        rest = slots - half * layers
        for quota, spread in zip(quotas, spreads, strict=True):
            assert abs(quota - half - rest * spread / sum(spreads)) < 1
            assert quota >= max(1, half)
        for layer in range(layers):
            for other in range(layers):
                if spreads[layer] > spreads[other] + 1e-9:
                    assert quotas[layer] >= quotas[other]
        differ += max(quotas) > min(quotas) + 1  # as equal shares never are
    assert differ > 15


def test_entropy_shares_by_hand() -> None:
    policy = EntropyPolicy(8, 2, 8)
    assert [policy.quota(layer) for layer in (0, 1)] == [4, 4]
    for turn in range(200):
        policy.visit(0, [5])
        # Shares change once a pass: layer 0 alone changes nothing.
        before = [policy.quota(layer) for layer in (0, 1)]
        policy.visit(0, [5])
        assert [policy.quota(layer) for layer in (0, 1)] == before
        policy.visit(1, [turn % 8])
    # A spread of 1 and one of nearly 8: 2 + 4 x 1/9 and 2 + 4 x 8/9 slots.
    assert [policy.quota(layer) for layer in (0, 1)] == [2, 6]
    policy.divide(18)
    # 4 + 10 x 1/9 and 4 + 10 x 8/9.
    assert [policy.quota(layer) for layer in (0, 1)] == [5, 13]


@pytest.mark.parametrize(("slots", "layers"), [(5, 4), (4, 4), (7, 4), (6, 5), (9, 5), (3, 2)])
def test_entropy_shares_add_up_where_there_is_little_more_than_one_each(
    slots: int, layers: int
) -> None:
    policy = EntropyPolicy(slots, layers, 8)
    for _ in range(100):
        for layer in range(layers):
            policy.visit(layer, [0] if layer else list(range(8)))
    quotas = [policy.quota(layer) for layer in range(layers)]
    assert min(quotas) >= 1
    assert sum(quotas) == slots


@pytest.mark.parametrize(("slots", "layers"), [(1, 3), (2, 3), (0, 2)])
def test_entropy_gives_every_layer_one_of_too_few(slots: int, layers: int) -> None:
    policy = EntropyPolicy(slots, layers, 4)
    for layer in range(layers):
        policy.visit(layer, [0])
    assert sorted({policy.quota(layer) for layer in range(layers)}) in ([1], [1, slots])


def test_entropy_takes_from_who_has_more_than_its_share() -> None:
    rng = random.Random(3)
    over_seen = 0
    for _ in range(15):
        layers, experts = rng.randint(2, 4), rng.randint(3, 7)
        policy, past = (
            EntropyPolicy(rng.randint(layers, 12), layers, experts),
            Past(layers, experts),
        )
        for _ in range(80):
            past.random_step(rng, policy)
            held = Counter(key.layer for key in past.used)
            over = {layer for layer in range(layers) if held[layer] > policy.quota(layer)}
            lru = past.least_recently_used(None)
            first = [key for key in lru if key.layer in over]
            check_who_goes(policy, past, first + [key for key in lru if key.layer not in over])
            over_seen += 0 < len(first) < len(lru)
    assert over_seen > 200


def test_lru_lets_go_who_was_used_longest_ago() -> None:
    rng = random.Random(4)
    for _ in range(10):
        layers, experts = rng.randint(1, 4), rng.randint(2, 7)
        policy, past = LruPolicy(9, layers, experts), Past(layers, experts)
        for _ in range(80):
            past.random_step(rng, policy)
            check_who_goes(policy, past, past.least_recently_used(None))


@pytest.mark.parametrize("name", CACHE_POLICIES.names)
def test_no_policy_evicts_what_is_pinned(name: str) -> None:
    """Random claims, ahead and on demand: the victim is one resident that is not in use."""
    for seed in range(12):
        rng = random.Random(seed)
        layers, experts = rng.randint(1, 4), rng.randint(2, 7)
        slots = rng.randint(1, layers * experts)
        cache = ExpertCache(slots, CACHE_POLICIES[name](slots, layers, experts))
        everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        evicted = 0
        for _ in range(200):
            key = rng.choice(everyone)
            if rng.random() < 0.3:
                cache.policy.visit(key.layer, rng.sample(range(experts), 2))
            if rng.random() < 0.3:
                cache.policy.hint_next_use(key.layer, rng.sample(range(experts), 2), rng.random())
            held = {k for k in everyone if k in cache}
            pinned = {k for k in held if rng.random() < 0.4}
            cache.pin(pinned)
            if cache.lookup(key) is None:
                ahead = rng.random() < 0.5
                slot = cache.claim(key.layer, ahead)
                gone = held - {k for k in everyone if k in cache}
                assert gone.isdisjoint(pinned)
                assert len(gone) <= 1
                assert slot is not None or not gone
                evicted += len(gone)
                if slot is not None:
                    cache.publish(key, slot, ahead)
            cache.unpin(pinned)
            held_now = {k for k in everyone if k in cache}
            assert set(cache.policy.candidates(None)) <= held_now
        assert evicted > 0 or slots > layers * experts // 2


def test_policies_by_their_names() -> None:
    made = [CACHE_POLICIES[name](6, 2, 4) for name in CACHE_POLICIES.names]
    assert [type(policy) for policy in made] == [
        LruPolicy,
        LfuPolicy,
        EntropyPolicy,
        LookaheadPolicy,
    ]
    with pytest.raises(SpeqError, match="cache policy 'random' is unknown; give one of lru, lfu"):
        CACHE_POLICIES["random"]


class OldestFirst:
    """A policy of no one's: shares as they come, and whoever came first goes first."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self.visited: list[tuple[int, list[int]]] = []
        self.divide(num_slots)
        self.clear()

    def divide(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def quota(self, layer: int) -> int:
        return self.num_slots

    def touch(self, key: ExpertKey) -> None:
        self.residents.setdefault(key)

    def forget(self, key: ExpertKey) -> None:
        del self.residents[key]

    def clear(self) -> None:
        self.residents: dict[ExpertKey, None] = {}

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        pass

    def visit(self, layer: int, experts: list[int]) -> None:
        self.visited.append((layer, experts))

    def expect(self, rows: int) -> None:
        pass

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        pass

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        return [key for key in self.residents if layer in (None, key.layer)]


def test_a_policy_is_a_class_and_a_line(tiny: Callable[[str], Path]) -> None:
    """One that is declared here alone runs a generation, chosen as users choose."""
    model, prompt = tiny("qwen2_moe"), [*b"a policy of one's own"]
    options: dict[str, Any] = {"dtype": "float32", "context_length": 80, "draft_length": 3}
    budget, _ = two_slot_budget(model, 80, "float32", 3)
    with CACHE_POLICIES.registered("oldest-first", OldestFirst):
        generator = Generator.from_pretrained(model, budget, cache_policy="oldest-first", **options)
        result = generator.generate(prompt, max_new_tokens=20, ignore_eos=True)
        policy = generator.runtime.engine.offload.loader.cache.policy
        generator.close()
    assert result.token_ids == greedy_tokens(load_plain(model), prompt, 20)
    assert isinstance(policy, OldestFirst)
    assert policy.visited
    assert len(policy.residents) == 2
    with pytest.raises(SpeqError, match="cache_policy is 'oldest-first'; it must be one of lru"):
        RunConfig.of("1GiB", cache_policy="oldest-first")


def test_where_all_fits_nobody_makes_room() -> None:
    cache = ExpertCache(7, KeepAllPolicy(7, 2, 3))
    for layer in range(2):
        for expert in range(3):
            slot = cache.claim(layer)
            assert slot is not None
            cache.publish(ExpertKey(layer, expert), slot)
        assert cache.claim(layer) is None
    assert cache.free_slots == 1
    assert [cache.lookup(ExpertKey(1, expert)) for expert in range(3)] == [3, 4, 5]
