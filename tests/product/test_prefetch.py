"""When the draft's routes are acted on, and what becomes of what was fetched for them."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from bench.lab.single_shot import SingleLater, SingleShot, SingleSooner, offer_single_shots
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.routing import Route
from speq.scheduler.eviction import LookaheadPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.link_pace import FEWEST
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import QUIET_VISITS, OnDemand, Prefetcher, ThreePhase
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.helpers.fake_transfer import Clock, FakeTransfer

LAYERS, EXPERTS = 3, 12


class Listening(LookaheadPolicy):
    """told: what it was foretold, as (layer, experts, known)."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        super().__init__(num_slots, num_layers, num_experts)
        self.told: list[tuple[int, list[int], float]] = []

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        self.told.append((layer, list(experts), known))
        super().hint_next_use(layer, experts, known)


class KeepAll(Listening):
    """Makes no room, and need not be told."""

    keeps_all = True


class Rig:
    """A prefetcher over transfers that take place when the test says so."""

    def __init__(
        self,
        prefetcher: type[ThreePhase | SingleShot] = ThreePhase,
        slots: int = 30,
        rng: random.Random | None = None,
        policy: type[Listening] = Listening,
    ) -> None:
        self.transfer = FakeTransfer(rng)
        self.recorder = Recorder(Clock())
        self.policy = policy(slots, LAYERS, EXPERTS)
        self.loader = ExpertLoader(ExpertCache(slots, self.policy), self.transfer, self.recorder)
        self.prefetcher = prefetcher(self.loader, LookaheadBuffer(LAYERS))

    def draft(self, token: int, layer: int, weights: dict[int, float]) -> list[ExpertKey]:
        """What a draft's route has asked for that was not before."""
        before = len(self.transfer.asked)
        route = Route(torch.tensor([list(weights)]), torch.tensor([list(weights.values())]), None)
        self.prefetcher.request(token, layer, route)
        assert {p for _, p in self.transfer.asked[before:]} <= {Priority.PREFETCH}
        return [key for key, _ in self.transfer.asked[before:]]

    def told(self, probability: float) -> None:
        """One more token is drafted, which stands with this probability."""
        self.prefetcher.lookahead.extend(probability)

    def verify(
        self,
        layer: int,
        rows: list[list[int]],
        following: Callable[[list[int]], Tensor] | None = None,
    ) -> list[ExpertKey]:
        """Serve a layer for these rows; what was asked for ahead meanwhile."""
        before = len(self.transfer.asked)
        ids = torch.tensor(rows)
        self.prefetcher.observe(layer, Route(ids, torch.ones(ids.shape), None, following))
        wanted = sorted({expert for row in rows for expert in row})
        served = [set(wave) for wave in self.prefetcher.serve(layer, wanted)]
        assert sorted(expert for wave in served for expert in wave) == wanted
        asked = self.transfer.asked[before:]
        return [key for key, priority in asked if priority is Priority.PREFETCH]

    def arrive(self) -> None:
        """Let all that is under way arrive."""
        self.transfer.end_all()
        self.loader.collect_finished()


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_three_phases() -> None:
    rig = Rig()
    rig.prefetcher.begin(4)
    # All that the pending token wants.
    assert rig.draft(0, 0, {1: 0.7, 2: 0.3}) == keys(0, 1, 2)
    rig.arrive()
    # Of other tokens what is likely: with its even share of the weight ...
    assert rig.draft(1, 0, {3: 0.8, 4: 0.2}) == keys(0, 3)
    assert rig.draft(1, 2, {5: 0.9, 6: 0.1}) == keys(2, 5)
    rig.arrive()
    # ... or named twice.
    assert rig.draft(2, 0, {0: 0.8, 4: 0.2}) == keys(0, 4, 0)
    rig.arrive()
    assert rig.draft(2, 1, {9: 0.4, 7: 0.6}) == keys(1, 7)
    rig.arrive()
    # From the last token on everything, in the order of layers.
    assert rig.draft(3, 0, {8: 0.3, 11: 0.7}) == [*keys(0, 11, 8), *keys(1, 9), *keys(2, 6)]
    assert rig.draft(3, 1, {7: 1.0}) == []
    rig.arrive()
    assert rig.draft(3, 2, {5: 0.5, 11: 0.5}) == keys(2, 11)


def test_tokens_that_hardly_stand_wait() -> None:
    """Until the draft ends; and what is likelier to be used goes first."""
    rig = Rig()
    rig.prefetcher.begin(4)
    rig.draft(0, 0, {1: 1.0})
    rig.told(0.7)
    assert rig.draft(1, 0, {2: 0.6, 3: 0.4}) == keys(0, 2)
    rig.told(0.5)
    assert rig.draft(2, 0, {4: 0.6, 3: 0.4}) == []
    rig.arrive()
    # 0.35 for each of 4 and 5, and half of 0.7, of 0.35 and of 0.35 for 3.
    assert rig.draft(2, 1, {4: 0.7, 5: 0.1}) == []
    rig.told(1.0)
    assert rig.draft(3, 1, {5: 0.8, 6: 0.2}) == [*keys(0, 3, 4), *keys(1, 5, 4)]
    rig.arrive()
    assert rig.draft(3, 2, {0: 1.0}) == [*keys(1, 6), *keys(2, 0)]


def test_a_draft_that_is_stopped_saturates_at_once() -> None:
    rig = Rig()
    rig.prefetcher.begin(12)
    for layer in range(LAYERS):
        rig.draft(0, layer, {1: 1.0})
        rig.draft(1, layer, {2: 0.9, 3: 0.1})
        rig.arrive()
    before = len(rig.transfer.asked)
    rig.prefetcher.end()
    asked = [key for key, _ in rig.transfer.asked]
    assert asked[before:]
    while rig.loader.under_way:
        rig.arrive()
        rig.prefetcher.end()
    named = {ExpertKey(layer, expert) for layer in range(LAYERS) for expert in (1, 2, 3)}
    assert {key for key, _ in rig.transfer.asked} == named


def test_a_draft_that_named_nothing_asks_for_nothing() -> None:
    for length in (0, 3):
        rig = Rig()
        rig.prefetcher.begin(length)
        rig.prefetcher.end()
        assert rig.transfer.asked == []


def test_the_nearest_layer_goes_first() -> None:
    rig = Rig()
    rig.prefetcher.begin(1)
    assert rig.draft(0, 0, dict.fromkeys(range(FEWEST), 0.1)) == keys(0, *range(FEWEST))
    assert rig.draft(0, 2, {3: 1.0}) == []
    assert rig.draft(0, 1, {1: 0.9, 2: 0.1}) == []
    rig.arrive()
    assert rig.draft(0, 2, {3: 1.0}) == [*keys(1, 1, 2), *keys(2, 3)]


def test_a_new_step_knows_nothing_of_the_last() -> None:
    rig = Rig()
    rig.prefetcher.begin(3)
    rig.draft(1, 0, {1: 0.7, 2: 0.3})
    rig.prefetcher.begin(3)
    assert rig.draft(1, 0, {2: 0.3, 3: 0.7}) == keys(0, 3)
    # 2 was named once in this draft, and 1 by none.
    assert rig.draft(2, 1, {4: 1.0}) == [*keys(0, 2), *keys(1, 4)]


def test_weights_need_not_add_up_to_one() -> None:
    """As where a family does not renormalise them: the even share is of what they add up to."""
    rig = Rig()
    rig.prefetcher.begin(3)
    assert rig.draft(1, 0, {1: 0.07, 2: 0.05, 3: 0.01}) == keys(0, 1, 2)


def test_the_policy_hears_how_much_of_a_pass_is_known() -> None:
    rig = Rig(SingleLater)
    rig.prefetcher.begin(3)
    rig.draft(0, 1, {4: 0.5, 5: 0.5})
    rig.draft(2, 0, {6: 0.5, 7: 0.5})
    # Of the pending token, the draft's three make four with it; the last one's own is not known.
    assert rig.policy.told == [(1, [4, 5], 1 / 4), (0, [6, 7], 3 / 4)]


def test_single_sooner_and_later_act_once() -> None:
    for mode in (SingleSooner, SingleLater):
        rig = Rig(mode)
        rig.prefetcher.begin(3)
        named: list[ExpertKey] = []
        for token in range(3):
            for layer in range(LAYERS):
                named += keys(layer, token, token + 1)
                asked = rig.draft(token, layer, {token: 0.5, token + 1: 0.5})
                if mode is SingleSooner and (token, layer) == (0, LAYERS - 1):
                    assert sorted(asked) == sorted(set(named))
                else:
                    assert asked == []
        before = len(rig.transfer.asked)
        rig.prefetcher.end()  # here or sooner: a draft may be stopped
        asked = [key for key, _ in rig.transfer.asked[before:]]
        assert sorted(asked) == (sorted(set(named)) if mode is SingleLater else [])


def test_only_so_many_are_under_way() -> None:
    rig = Rig()
    rig.prefetcher.begin(3)
    everyone = {expert: 1 / EXPERTS for expert in range(EXPERTS)}
    assert rig.draft(2, 0, everyone) == keys(0, *range(FEWEST))
    assert rig.loader.under_way == FEWEST
    # None more while these are on their way; as many again as have arrived.
    assert rig.draft(2, 1, {0: 1.0}) == []
    rig.transfer.end(ExpertKey(0, 0))
    rig.transfer.end(ExpertKey(0, 1))
    assert rig.draft(2, 2, {0: 1.0}) == keys(0, FEWEST, FEWEST + 1)
    rig.arrive()
    assert rig.draft(2, 1, {0: 1.0}) == keys(0, *range(FEWEST + 2, 2 * FEWEST + 2))


def test_single_shots_ask_for_all_at_once() -> None:
    rig = Rig(SingleLater)
    rig.prefetcher.begin(1)
    for layer in range(LAYERS - 1):
        assert rig.draft(0, layer, {expert: 0.1 for expert in range(10)}) == []
    assert rig.draft(0, LAYERS - 1, {expert: 0.1 for expert in range(10)}) == []
    rig.prefetcher.end()
    asked = [key for key, _ in rig.transfer.asked]
    assert asked == [key for layer in range(LAYERS) for key in keys(layer, *range(10))]


def test_verification_goes_on_prefetching_and_gives_up_what_has_passed() -> None:
    rig = Rig()
    rig.transfer.depth = 1
    rig.prefetcher.begin(3)
    for layer in range(LAYERS):
        assert rig.draft(1, layer, {1: 0.8, 2: 0.1, 3: 0.1}) == keys(layer, 1)
    # Saturation: everything of the layers behind it, as room comes, and none of its own.
    served = rig.prefetcher.serve(0, [1])
    assert set(next(served)) == {1}
    assert rig.transfer.asked[3:] == [(key, Priority.PREFETCH) for key in keys(1, 2, 3)]
    assert rig.loader.under_way == FEWEST
    assert list(served) == []
    step = rig.recorder.step
    assert (step.requests, step.hits, step.late) == (1, 0, 1)
    # Layer 1 wants one of what is on its way; the others of it that have not begun are given up.
    assert [set(wave) for wave in rig.prefetcher.serve(1, [3])] == [{3}]
    assert (step.requests, step.hits, step.late) == (2, 0, 2)
    begun = set(rig.transfer.begun)
    assert not any(key.layer == 1 and key not in begun for key in rig.transfer.open_keys)
    asked = {key for key, _ in rig.transfer.asked}
    assert asked == {*keys(0, 1), *keys(1, 1, 2, 3), *keys(2, 1, 2, 3)}


def following_of(
    logits: dict[int, float], asked: list[list[int]] | None = None
) -> Callable[[list[int]], Tensor]:
    """What the next layer's router says of every row; `asked` notes for which ones it is."""

    def following(rows: list[int]) -> Tensor:
        if asked is not None:
            asked.append(rows)
        row = torch.full((EXPERTS,), -9.0)
        row[list(logits)] = torch.tensor(list(logits.values()))
        return row.repeat(len(rows), 1)

    return following


def guess_and_verify(rig: Rig, predicted: dict[int, float], wanted: list[int]) -> list[ExpertKey]:
    """A step without a draft: what was asked for because layer 0 was told of layer 1."""
    rig.prefetcher.begin(0)
    ahead = rig.verify(0, [[0, 1]], following_of(predicted))
    rig.verify(1, [wanted])
    rig.verify(2, [[0, 1]])
    rig.arrive()
    return ahead


def test_guesses_are_acted_on_once_they_prove_right() -> None:
    rig = Rig(slots=LAYERS * EXPERTS)
    # Margins over the third: 1.1 and 1.2, one class. Even odds do not pay.
    sure = {2: 2.1, 3: 2.2, 4: 1.0}
    assert guess_and_verify(rig, sure, [2, 3]) == []
    # (2 + 2) / (4 + 2) is 0.67.
    assert guess_and_verify(rig, {5: 2.1, 6: 2.2, 4: 1.0}, [8, 9]) == keys(1, 6, 5)
    # (2 + 2) / (4 + 4) is a half again.
    assert guess_and_verify(rig, {10: 2.1, 11: 2.2, 4: 1.0}, [8, 9]) == []


def test_guesses_of_what_is_there_teach_nothing() -> None:
    rig = Rig(slots=LAYERS * EXPERTS)
    rig.verify(1, [[2, 3]])
    for _ in range(5):
        assert guess_and_verify(rig, {2: 2.1, 3: 2.2, 4: 1.0}, [2, 3]) == []
    assert guess_and_verify(rig, {5: 2.1, 6: 2.2, 4: 1.0}, [5, 6]) == []


def test_guesses_are_made_for_tokens_that_no_draft_spoke_of() -> None:
    rig, asked = Rig(), list[list[int]]()
    rig.prefetcher.begin(2)
    for token in range(2):
        for layer in range(LAYERS):
            rig.draft(token, layer, {1: 0.5, 2: 0.5})
            rig.arrive()
    rows = [[1, 2], [1, 2], [1, 3]]
    rig.verify(0, rows, following_of({4: 1.0, 5: 2.0}, asked))
    rig.verify(1, rows, None)
    assert asked == [[2]]
    # A row whose draft ended in between: of the layers it reached nothing is guessed.
    asked.clear()
    rig.prefetcher.begin(2)
    rig.draft(0, 0, {1: 0.5, 2: 0.5})
    rig.draft(0, 1, {1: 0.5, 2: 0.5})
    rig.verify(0, rows[:2], following_of({4: 1.0, 5: 2.0}, asked))
    rig.verify(1, rows[:2], following_of({4: 1.0, 5: 2.0}, asked))
    assert asked == [[1], [0, 1]]


def test_names_that_no_router_chose_are_acted_on_once_they_prove_right() -> None:
    """And are believed apart from guesses, which go on beside them."""
    rig, asked = Rig(slots=LAYERS * EXPERTS), list[list[int]]()

    def step(named: list[int], wanted: list[int]) -> list[ExpertKey]:
        rig.prefetcher.begin(1)
        before = len(rig.transfer.asked)
        ids = torch.tensor([named])
        route = Route(ids, torch.full(ids.shape, 0.5), margins=[[1.1, 1.2]])
        rig.prefetcher.request(0, 1, route)
        rig.prefetcher.end()
        ahead = [key for key, _ in rig.transfer.asked[before:]]
        assert rig.prefetcher.new_experts == 0
        rig.verify(0, [[0, 1]], following_of({10: 2.1, 11: 2.2, 4: 1.0}, asked))
        rig.verify(1, [wanted])
        rig.arrive()
        return ahead

    # As guesses are: even odds do not pay, (2 + 2) / (4 + 2) do, and (2 + 2) / (4 + 4) do not.
    assert step([2, 3], [2, 3]) == []
    assert step([5, 6], [8, 9]) == keys(1, 5, 6)
    assert step([7, 0], [8, 9]) == []
    # The layer's router was asked of the same row all the same.
    assert asked == [[0], [0], [0]]
    assert rig.prefetcher.lookahead.expert_ids(0, 1) == [7, 0]


@pytest.mark.parametrize("mode", [SingleSooner, SingleLater])
def test_single_shots_guess_nothing(mode: type[SingleShot]) -> None:
    rig, asked = Rig(mode), list[list[int]]()
    rig.prefetcher.begin(0)
    assert rig.verify(0, [[0, 1]], following_of({2: 1.0}, asked)) == []
    assert asked == []


def test_drafts_of_what_is_there_and_stays_tell_nobody() -> None:
    rig = Rig(slots=LAYERS * EXPERTS, policy=KeepAll)
    rig.verify(1, [[4, 5]])
    rig.prefetcher.begin(3)
    rig.policy.told.clear()
    assert rig.draft(0, 1, {4: 0.7, 5: 0.3}) == []
    assert rig.policy.told == []
    # What is not there is asked for, and what it is asked for with.
    assert rig.draft(1, 1, {4: 0.4, 6: 0.6}) == keys(1, 6)
    assert [layer for layer, *_ in rig.policy.told] == [1]


def test_layers_that_want_nothing_are_not_guessed_for() -> None:
    """Nor asked what they want, until something is missing again."""
    rig = Rig()
    asked: list[list[int]] = []
    rig.verify(1, [[4, 5]])  # missing: quiet begins behind it

    def visit(experts: list[int]) -> None:
        rig.prefetcher.begin(0)
        rig.verify(0, [[0, 1]], following_of({4: 1.0, 5: 2.0}, asked))
        rig.verify(1, [experts])
        rig.arrive()

    for turn in range(QUIET_VISITS):
        visit([4, 5])
        assert len(asked) == turn + 1
    visit([4, 5])
    visit([4, 6])
    assert len(asked) == QUIET_VISITS
    visit([4, 5])
    assert len(asked) == QUIET_VISITS + 1


def test_probable_guesses_stay() -> None:
    """The policy hears of them, all that is to be known of that pass, and prefetches or not."""
    rig = Rig(slots=LAYERS * EXPERTS)
    guess_and_verify(rig, {2: 2.1, 3: 2.2, 4: 1.0}, [2, 3])
    rig.policy.told.clear()
    guess_and_verify(rig, {2: 2.1, 7: 2.2, 4: 1.0}, [2, 3])
    assert rig.policy.told == [(1, [7, 2], 1.0)]


def test_what_is_evicted_unused_is_wasted() -> None:
    rig = Rig(slots=2)
    rig.prefetcher.begin(3)
    rig.draft(2, 0, {1: 0.5, 2: 0.5})
    rig.arrive()
    list(rig.prefetcher.serve(0, [1]))  # the other was named for nothing
    list(rig.prefetcher.serve(1, [4]))
    list(rig.prefetcher.serve(2, [5]))
    assert (rig.recorder.step.used, rig.recorder.step.wasted) == (1, 1)
    assert rig.recorder.step.by_layer[0].wasted == 1
    assert ExpertKey(0, 2) not in rig.loader.cache


@pytest.mark.parametrize("mode", [OnDemand, ThreePhase, SingleSooner, SingleLater])
@pytest.mark.parametrize("policy", CACHE_POLICIES.names)
@pytest.mark.parametrize("slots", [1, 2, 5, 13, 36])
def test_every_verification_is_served(mode: type[Prefetcher], policy: str, slots: int) -> None:
    """Random drafts and guesses, right and wrong, over transfers that end when they like."""
    rng = random.Random(slots)
    transfer, recorder = FakeTransfer(rng), Recorder()
    of_slots = CACHE_POLICIES[policy](slots, LAYERS, EXPERTS)
    loader = ExpertLoader(ExpertCache(slots, of_slots), transfer, recorder)
    lookahead = LookaheadBuffer(LAYERS)
    prefetcher = mode(loader, lookahead)
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
            lookahead.extend(rng.random())
        if rng.random() < 0.9:  # the engine always tells
            prefetcher.end()
        for layer in range(LAYERS):
            wanted = {e for e in named[layer] if rng.random() < 0.8} | {rng.randrange(EXPERTS)}
            guesses = torch.tensor(
                [[rng.random() for _ in range(EXPERTS)] for _ in range(length + 1)]
            )
            rows = torch.tensor([sorted(wanted)] * (length + 1))
            following = None if layer + 1 == LAYERS else guesses.__getitem__
            prefetcher.observe(layer, Route(rows, torch.ones(rows.shape), None, following))
            seen: list[int] = []
            for wave in prefetcher.serve(layer, sorted(wanted)):
                for expert, slot in wave.items():
                    assert transfer.contents[slot] == ExpertKey(layer, expert)
                seen += wave
            assert sorted(seen) == sorted(wanted)
    cache = loader.cache
    assert cache.free_slots + len(cache) + loader.under_way == slots
    prefetched = sum(priority is Priority.PREFETCH for _, priority in transfer.asked)
    if mode is OnDemand:
        assert prefetched == 0
    elif slots > LAYERS:
        assert prefetched > 0


def test_single_shots_are_offered_for_as_long_as_a_bench_runs() -> None:
    offered_else = PREFETCHERS.names
    assert offered_else == ("none", "three-phase")
    with offer_single_shots():
        assert PREFETCHERS.names == (*offered_else, "single-sooner", "single-later")
        with offer_single_shots():
            assert PREFETCHERS["single-later"] is SingleLater
        assert RunConfig.of("1GiB", prefetch="single-sooner").prefetch == "single-sooner"
    assert PREFETCHERS.names == offered_else
    with pytest.raises(SpeqError, match="prefetch is 'single-sooner'"):
        RunConfig.of("1GiB", prefetch="single-sooner")
