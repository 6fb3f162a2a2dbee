"""Prompts: what is loaded for the next layer, when, and how often; on transfers without bytes."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from speq.routing import Route
from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.layer_stream import LONG_CHUNK, LayerStream
from speq.scheduler.peer_devices import PeerDevices, PeerSlot
from speq.scheduler.route_history import LIKELY, PRIOR_ROWS, RouteHistory
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from speq.units import Done
from tests.helpers.fake_transfer import Clock, FakeTransfer

Choices = list[list[int]]


def route(choices: Choices) -> Route:
    topk_ids = torch.tensor(choices)
    return Route(topk_ids, torch.ones(topk_ids.shape))


def random_choices(rng: random.Random, rows: int, experts: int, top_k: int) -> Choices:
    """Rows that prefer experts of small numbers, as routers have their favourites."""
    weights = [1 / (1 + expert) for expert in range(experts)]
    chosen = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < top_k:
            (expert,) = rng.choices(range(experts), weights)
            if expert not in row:
                row.append(expert)
        chosen.append(row)
    return chosen


def probabilities(seen: Choices, experts: int, top_k: int, rows: int) -> list[float]:
    """That one of so many rows wants each expert, after those that were seen."""
    counts = Counter(expert for row in seen for expert in row)
    shares = [
        (counts[e] + PRIOR_ROWS * top_k / experts) / (len(seen) + PRIOR_ROWS)
        for e in range(experts)
    ]
    return [1 - (1 - share) ** rows for share in shares]


# Of probabilities: history computes in single precision.
NEAR = 1e-5


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 4), (5, 5), (60, 4)])
def test_likely_experts_match_a_count(experts: int, top_k: int) -> None:
    rng = random.Random(experts)
    history = RouteHistory(3, experts)
    seen: list[Choices] = [[], [], []]
    kinds = set()
    for _ in range(30):
        layer = rng.randrange(3)
        choices = random_choices(rng, rng.choice([1, 3, 20]), experts, top_k)
        history.observe(layer, route(choices))
        seen[layer] += choices
        for of_layer in range(3):
            rows = rng.choice([1, 2, 5, 30, 600])
            expected = probabilities(seen[of_layer], experts, top_k, rows)
            used = rng.randint(1, experts)
            likely = history.likely(of_layer, rows, used)
            if not seen[of_layer]:
                assert len(likely) == (experts if used >= LIKELY * experts else 0)
                continue
            assert len(set(likely)) == len(likely)
            for expert, wanted in enumerate(expected):
                if abs(wanted - LIKELY) > NEAR:
                    assert (expert in likely) == (wanted > LIKELY)
                    kinds.add(expert in likely)
            for sooner, later in pairwise(likely):
                assert expected[sooner] > expected[later] - NEAR
    assert kinds == {True, False} or top_k == experts


def test_a_layer_without_history_uses_as_many_experts_as_another() -> None:
    history = RouteHistory(2, 12)
    history.observe(0, route([[3, 4, 5]]))
    assert history.likely(1, 1000, used=6) == list(range(12))
    assert history.likely(1, 1000, used=5) == []
    assert history.likely(0, 2, used=1)[:3] == [3, 4, 5]


class Stream:
    """A prompt's passes over fakes: routes, what is served, what is loaded."""

    def __init__(
        self,
        slots: int,
        layers: int,
        experts: int,
        rng: random.Random | None = None,
        depth: int = 2,
    ) -> None:
        self.slots, self.layers, self.experts = slots, layers, experts
        self.transfer = FakeTransfer(rng, depth)
        self.cache = ExpertCache(slots, LruPolicy(slots, layers, experts))
        self.loader = ExpertLoader(self.cache, self.transfer, Recorder(Clock()))
        self.history = RouteHistory(layers, experts)
        self.stream = LayerStream(self.loader, self.history, layers)
        self.seen: list[Choices] = [[] for _ in range(layers)]

    def layer(self, layer: int, choices: Choices) -> list[tuple[ExpertKey, Priority]]:
        """Run one layer of a pass; return what was submitted meanwhile."""
        before = len(self.transfer.asked)
        self.seen[layer] += choices
        self.stream.observe(layer, route(choices))
        wanted = sorted({expert for row in choices for expert in row})
        served: list[int] = []
        for wave in self.stream.serve(layer, wanted):
            for expert, slot in wave.items():
                assert self.transfer.contents[slot] == ExpertKey(layer, expert)
            served += wave
            if self.transfer.rng is not None:
                self.transfer.end_some()
            for expert, slot in wave.items():
                assert self.transfer.contents[slot] == ExpertKey(layer, expert)
        assert sorted(served) == wanted
        return self.transfer.asked[before:]

    def quotas(self) -> list[int]:
        return [self.cache.policy.quota(layer) for layer in range(self.layers)]

    def residents(self, layer: int) -> list[ExpertKey]:
        keys = [ExpertKey(layer, expert) for expert in range(self.experts)]
        return [key for key in keys if key in self.cache]

    def assert_nothing_is_lost(self) -> None:
        while self.transfer.open_keys:
            self.transfer.end_all()
        self.loader.collect_finished()
        assert self.cache.free_slots + len(self.cache) == self.slots
        wanted = [layer for layer in range(self.layers) for _ in range(self.quotas()[layer])]
        claimed = [self.cache.claim(layer) for layer in wanted[: self.slots]]
        assert {*claimed} == {*range(self.slots)}


def chunks(tokens: int, chunk: int) -> Iterator[int]:
    """Rows of each chunk."""
    for start in range(0, tokens, chunk):
        yield min(chunk, tokens - start)


# (slots, layers, experts): half of them, few, all but one, and all.
SIZES = [(16, 4, 8), (9, 4, 8), (31, 4, 8), (32, 4, 8), (12, 2, 10)]


@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunk", [20, LONG_CHUNK])
def test_each_expert_is_loaded_at_most_once_a_chunk(
    slots: int, layers: int, experts: int, depth: int, chunk: int
) -> None:
    """Where every row wants all: for a demand or ahead of it, from one pass of its layer on."""
    for seed in range(5):
        rng = random.Random(seed)
        made = Stream(slots, layers, experts, rng=rng, depth=depth)
        tokens = 3 * chunk + 17
        loads: Counter[ExpertKey] = Counter()
        with made.stream.prompt(tokens, chunk, None):
            for rows in chunks(tokens, chunk):
                for layer in range(layers):
                    everyone = [rng.sample(range(experts), experts) for _ in range(rows)]
                    loads.update(key for key, _ in made.layer(layer, everyone))
                    for key in [key for key in loads if key.layer == layer]:
                        assert loads.pop(key) == 1
        assert not loads
        made.assert_nothing_is_lost()


@pytest.mark.parametrize(("slots", "layers", "experts"), [*SIZES, (3, 4, 6), (1, 3, 4)])
def test_random_prompts(slots: int, layers: int, experts: int) -> None:
    """Every layer gets what it wants, whatever is loaded ahead, and between prompts as well."""
    rng = random.Random(slots)
    made = Stream(slots, layers, experts, rng=rng)
    for _ in range(4):
        tokens, chunk = rng.randint(1, 2 * LONG_CHUNK), rng.choice([8, 64, LONG_CHUNK])
        with made.stream.prompt(tokens, chunk, None):
            for rows in chunks(tokens, chunk):
                for layer in range(layers):
                    made.layer(layer, random_choices(rng, rows, experts, 2))
        for layer in range(layers):  # a step of decoding: no stream, the same slots
            asked = rng.sample(range(experts), 2)
            for wave in made.loader.serve(layer, asked):
                for expert, slot in wave.items():
                    assert made.transfer.contents[slot] == ExpertKey(layer, expert)
    made.assert_nothing_is_lost()


def test_the_next_layer_comes_after_the_layer_that_is_served() -> None:
    rng = random.Random(5)
    layers, experts, top_k, chunk = 3, 8, 2, 6
    made = Stream(24, layers, experts)
    tokens = 3 * chunk
    done = 0
    with made.stream.prompt(tokens, chunk, None):
        for rows in chunks(tokens, chunk):
            done += rows
            for layer in range(layers):
                there = {*made.transfer.contents.values(), *made.transfer.open_keys}
                choices = random_choices(rng, rows, experts, top_k)
                asked = made.layer(layer, choices)

                following = (layer + 1) % layers
                coming = min(chunk, tokens - done) if following == 0 else rows
                own = [ExpertKey(layer, e) for e in sorted({e for row in choices for e in row})]
                wanted = probabilities(made.seen[following], experts, top_k, coming)
                if not made.seen[following]:
                    wanted = [len(own) / experts] * experts
                likely = {ExpertKey(following, e) for e in range(experts) if wanted[e] >= LIKELY}
                demands = [(key, Priority.DEMAND) for key in own if key not in there]
                assert asked[: len(demands)] == demands
                ahead = [key for key, _ in asked[len(demands) :]]
                assert {p for _, p in asked[len(demands) :]} <= {Priority.PREFETCH}
                assert set(ahead) == (likely - there if coming else set())
                chances = [wanted[key.expert] for key in ahead]
                assert all(a > b - NEAR for a, b in pairwise(chances))
                if done == chunk and layer < 2:
                    assert ahead  # nothing of the next layer was there yet
    made.assert_nothing_is_lost()


def test_the_last_layer_loads_for_the_next_chunk_and_the_last_chunk_for_nobody() -> None:
    made = Stream(12, 3, 8)
    rows = [list(range(8))] * LONG_CHUNK
    with made.stream.prompt(3 * LONG_CHUNK, LONG_CHUNK, None):
        for chunk in range(3):
            asked = [made.layer(layer, rows) for layer in range(3)]
            ahead = [{key.layer for key, p in each if p is Priority.PREFETCH} for each in asked]
            assert ahead == [{1}, {2}, {0} if chunk < 2 else set()]


@pytest.mark.parametrize("most_rows", [LONG_CHUNK, LONG_CHUNK - 1])
def test_chunks_of_more_rows_load_what_further_devices_hold(most_rows: int) -> None:
    made = Stream(12, 3, 8)
    held = [ExpertKey(1, expert) for expert in range(2)]
    slots = {key: PeerSlot(0, at) for at, key in enumerate(held)}
    made.loader.peers = PeerDevices(slots, most_rows)
    assert made.loader.at_hand(1, range(8)) == [0, 1]
    with made.stream.prompt(LONG_CHUNK, LONG_CHUNK, None):
        there = made.loader.at_hand(1, range(8))
        asked = made.layer(0, [list(range(8))] * LONG_CHUNK)
        ahead = {key for key, priority in asked if priority is Priority.PREFETCH}
        if most_rows < LONG_CHUNK:
            assert there == [] and {*held} <= ahead
        else:
            assert there == [0, 1] and ahead and not ahead & {*held}
    made.loader.forget()
    assert made.loader.at_hand(1, range(8)) == [0, 1]
    assert made.loader.missing(1, [0, 1, 2]) == {ExpertKey(1, 2)}
    made.loader.runs_rows(LONG_CHUNK + 1)
    assert made.loader.missing(1, [0, 1, 2]) == {ExpertKey(1, each) for each in range(3)}


def test_what_a_passed_layer_did_not_want_is_not_read() -> None:
    """Half of the experts are expected of each layer; others than those come."""
    made = Stream(24, 3, 8, depth=1)
    with made.stream.prompt(2, 2, None):
        for layer in range(3):
            made.layer(layer, [[0, 1], [2, 3]])
            waiting = [key for key in made.transfer.open_keys if key not in made.transfer.begun]
            assert {key.layer for key in waiting} == ({layer + 1} if layer < 2 else set())
    assert ExpertKey(2, 7) not in made.transfer.begun


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 4), (4, 4), (37, 5), (300, LONG_CHUNK)])
def test_progress(tokens: int, chunk: int) -> None:
    layers = 4
    told: list[tuple[int, int]] = []
    progress: Done = lambda done, total: told.append((done, total))  # noqa: E731
    made = Stream(8, layers, 4)
    passed = Counter[int]()
    with made.stream.prompt(tokens, chunk, progress):
        for rows in chunks(tokens, chunk):
            for layer in range(layers):
                made.layer(layer, [[0, 1]] * rows)
                passed[layer] += rows
                # Tokens are done by the part of all their layers that went before this one.
                before = passed.total() - rows
                assert abs(told[-1][0] - before / layers) < 1
    assert told[0] == (0, tokens)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {tokens}
    assert tokens - chunk <= told[-1][0] <= tokens
    # Passes after the prompt are none of it.
    count = len(told)
    made.layer(0, [[0, 1]])
    assert len(told) == count


@pytest.mark.parametrize(
    ("slots", "tokens", "chunk", "shared"),
    [
        # Of 64 experts. A quarter of the slots is spare...
        (40, LONG_CHUNK, LONG_CHUNK, 30),
        (40, 5 * LONG_CHUNK, LONG_CHUNK, 30),
        (40, 5 * LONG_CHUNK, 2 * LONG_CHUNK, 30),
        (3, LONG_CHUNK, LONG_CHUNK, 3),
        # ... but no more than there are experts without a slot.
        (60, LONG_CHUNK, LONG_CHUNK, 56),
        (64, LONG_CHUNK, LONG_CHUNK, 64),
        (70, LONG_CHUNK, LONG_CHUNK, 70),
        # Nor for short prompts, or short chunks of long ones.
        (40, LONG_CHUNK - 1, LONG_CHUNK, 40),
        (40, 5 * LONG_CHUNK, LONG_CHUNK - 1, 40),
        (40, LONG_CHUNK - 1, 5 * LONG_CHUNK, 40),
    ],
)
def test_slots_are_spared_for_long_chunks(slots: int, tokens: int, chunk: int, shared: int) -> None:
    made = Stream(slots, 4, 16)
    before = made.quotas()
    with made.stream.prompt(tokens, chunk, None):
        assert sum(made.quotas()) == max(shared, 4)
    assert made.quotas() == before


def test_a_prompt_that_fails_gives_the_shares_back() -> None:
    made = Stream(40, 4, 16, depth=16)
    told: list[int] = []
    before = made.quotas()
    rows = [list(range(16))] * LONG_CHUNK
    with (
        pytest.raises(RuntimeError, match="kernel failed"),
        made.stream.prompt(2 * LONG_CHUNK, LONG_CHUNK, lambda done, total: told.append(done)),
    ):
        made.layer(0, rows)
        made.layer(1, rows)
        made.transfer.end_all()
        made.loader.collect_finished()
        # Loaded ahead, beyond its share of seven or eight.
        assert len(made.residents(2)) > 10
        raise RuntimeError("kernel failed")
    assert made.quotas() == before == [10, 10, 10, 10]
    assert all(len(made.residents(layer)) <= 10 for layer in range(4))
    count = len(told)
    made.layer(2, [[0, 1]])
    assert len(told) == count
    made.assert_nothing_is_lost()
