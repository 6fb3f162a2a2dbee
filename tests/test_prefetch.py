"""When the draft's routes are acted on, and what becomes of what was fetched for them."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from speq.registries import CACHE_POLICIES
from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache, ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.lookahead_policy import LookaheadPolicy
from speq.scheduler.pace import FEWEST
from speq.scheduler.policies import eviction_policy
from speq.scheduler.prefetch import DraftGuided, Mode, OnDemand
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.fake_transfer import Clock, FakeTransfer

LAYERS, EXPERTS = 3, 12


class Listening(LookaheadPolicy):
    """told: what it was foretold, as (layer, experts, known)."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        super().__init__(num_slots, num_layers, num_experts)
        self.told: list[tuple[int, list[int], float]] = []

    def foretell(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        self.told.append((layer, list(experts), known))
        super().foretell(layer, experts, known)


class Rig:
    """A prefetcher over transfers that take place when the test says so."""

    def __init__(self, mode: Mode, slots: int = 30, rng: random.Random | None = None) -> None:
        self.transfer = FakeTransfer(rng)
        self.recorder = Recorder(Clock())
        self.policy = Listening(slots, LAYERS, EXPERTS)
        self.supply = ExpertSupply(ExpertCache(slots, self.policy), self.transfer, self.recorder)
        self.prefetcher = DraftGuided(self.supply, LookaheadBuffer(LAYERS), mode)

    def draft(self, token: int, layer: int, weights: dict[int, float]) -> list[ExpertKey]:
        """What a draft's route has asked for that was not before."""
        before = len(self.transfer.asked)
        route = Route(torch.tensor([list(weights)]), torch.tensor([list(weights.values())]), None)
        self.prefetcher.request(token, layer, route)
        assert {p for _, p in self.transfer.asked[before:]} <= {Priority.PREFETCH}
        return [key for key, _ in self.transfer.asked[before:]]

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
        self.supply.land()


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_three_phases() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(3)
    # What is likely: with its even share of the weight ...
    assert rig.draft(0, 0, {1: 0.7, 2: 0.3}) == keys(0, 1)
    assert rig.draft(0, 1, {7: 0.5, 8: 0.5}) == keys(1, 7, 8)
    rig.arrive()
    # ... or named twice, which also goes first.
    assert rig.draft(1, 0, {3: 0.8, 2: 0.2}) == keys(0, 2, 3)
    assert rig.draft(1, 2, {5: 0.9, 6: 0.1}) == keys(2, 5)
    rig.arrive()
    assert rig.draft(1, 1, {9: 0.4, 7: 0.6}) == []
    # From the last token on everything, in the order of layers.
    assert rig.draft(2, 0, {4: 0.3, 0: 0.7}) == [*keys(0, 4, 0), *keys(1, 9), *keys(2, 6)]
    assert rig.draft(2, 1, {7: 1.0}) == []
    rig.arrive()
    assert rig.draft(2, 2, {5: 0.5, 11: 0.5}) == keys(2, 11)


def test_the_nearest_layer_goes_first() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(1)
    assert rig.draft(0, 0, dict.fromkeys(range(FEWEST), 0.1)) == keys(0, *range(FEWEST))
    assert rig.draft(0, 2, {3: 1.0}) == []
    assert rig.draft(0, 1, {1: 0.9, 2: 0.1}) == []
    rig.arrive()
    assert rig.draft(0, 2, {3: 1.0}) == [*keys(1, 1, 2), *keys(2, 3)]


def test_a_new_step_knows_nothing_of_the_last() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(2)
    rig.draft(0, 0, {1: 0.7, 2: 0.3})
    rig.prefetcher.begin(2)
    assert rig.draft(0, 0, {2: 0.3, 3: 0.7}) == keys(0, 3)
    # 2 was named once in this draft, and 1 by none.
    assert rig.draft(1, 1, {4: 1.0}) == [*keys(0, 2), *keys(1, 4)]


def test_weights_need_not_add_up_to_one() -> None:
    """As where a family does not renormalise them: the even share is of what they add up to."""
    rig = Rig(Mode.THREE_PHASE)
    rig.prefetcher.begin(2)
    assert rig.draft(0, 0, {1: 0.07, 2: 0.05, 3: 0.01}) == keys(0, 1, 2)


def test_the_policy_hears_how_much_of_a_pass_is_known() -> None:
    rig = Rig(Mode.SINGLE_LATER)
    rig.prefetcher.begin(3)
    rig.draft(0, 1, {4: 0.5, 5: 0.5})
    rig.draft(2, 0, {6: 0.5, 7: 0.5})
    # Of the pending token, the draft's three make four with it; the last one's own is not known.
    assert rig.policy.told == [(1, [4, 5], 1 / 4), (0, [6, 7], 3 / 4)]


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
    everyone = {expert: 1 / EXPERTS for expert in range(EXPERTS)}
    assert rig.draft(2, 0, everyone) == keys(0, *range(FEWEST))
    assert rig.supply.under_way == FEWEST
    # None more while these are on their way; as many again as have arrived.
    assert rig.draft(2, 1, {0: 1.0}) == []
    rig.transfer.end(ExpertKey(0, 0))
    rig.transfer.end(ExpertKey(0, 1))
    assert rig.draft(2, 2, {0: 1.0}) == keys(0, FEWEST, FEWEST + 1)
    rig.arrive()
    assert rig.draft(2, 1, {0: 1.0}) == keys(0, *range(FEWEST + 2, 2 * FEWEST + 2))


def test_the_other_modes_ask_for_all_at_once() -> None:
    rig = Rig(Mode.SINGLE_LATER)
    rig.prefetcher.begin(1)
    for layer in range(LAYERS - 1):
        assert rig.draft(0, layer, {expert: 0.1 for expert in range(10)}) == []
    asked = rig.draft(0, LAYERS - 1, {expert: 0.1 for expert in range(10)})
    assert asked == [key for layer in range(LAYERS) for key in keys(layer, *range(10))]


def test_verification_goes_on_prefetching_and_gives_up_what_has_passed() -> None:
    rig = Rig(Mode.THREE_PHASE)
    rig.transfer.depth = 1
    rig.prefetcher.begin(2)
    for layer in range(LAYERS):
        assert rig.draft(0, layer, {1: 0.8, 2: 0.1, 3: 0.1}) == keys(layer, 1)
    # Saturation: everything of the layers behind it, as room comes, and none of its own.
    served = rig.prefetcher.serve(0, [1])
    assert set(next(served)) == {1}
    assert rig.transfer.asked[3:] == [(key, Priority.PREFETCH) for key in keys(1, 2, 3)]
    assert rig.supply.under_way == FEWEST
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


def guess_and_verify(rig: Rig, guessed: dict[int, float], wanted: list[int]) -> list[ExpertKey]:
    """A step without a draft: what was asked for because layer 0 was told of layer 1."""
    rig.prefetcher.begin(0)
    ahead = rig.verify(0, [[0, 1]], following_of(guessed))
    rig.verify(1, [wanted])
    rig.verify(2, [[0, 1]])
    rig.arrive()
    return ahead


def test_guesses_are_acted_on_once_they_prove_right() -> None:
    rig = Rig(Mode.THREE_PHASE, slots=LAYERS * EXPERTS)
    # Margins over the third: 1.1 and 1.2, one class. Even odds do not pay.
    sure = {2: 2.1, 3: 2.2, 4: 1.0}
    assert guess_and_verify(rig, sure, [2, 3]) == []
    # (2 + 2) / (4 + 2) is 0.67.
    assert guess_and_verify(rig, {5: 2.1, 6: 2.2, 4: 1.0}, [8, 9]) == keys(1, 6, 5)
    # (2 + 2) / (4 + 4) is a half again.
    assert guess_and_verify(rig, {10: 2.1, 11: 2.2, 4: 1.0}, [8, 9]) == []


def test_guesses_of_what_is_there_teach_nothing() -> None:
    rig = Rig(Mode.THREE_PHASE, slots=LAYERS * EXPERTS)
    rig.verify(1, [[2, 3]])
    for _ in range(5):
        assert guess_and_verify(rig, {2: 2.1, 3: 2.2, 4: 1.0}, [2, 3]) == []
    assert guess_and_verify(rig, {5: 2.1, 6: 2.2, 4: 1.0}, [5, 6]) == []


def test_guesses_are_made_for_tokens_that_no_draft_spoke_of() -> None:
    rig, asked = Rig(Mode.THREE_PHASE), list[list[int]]()
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


@pytest.mark.parametrize("mode", [Mode.SINGLE_SOONER, Mode.SINGLE_LATER])
def test_the_other_modes_guess_nothing(mode: Mode) -> None:
    rig, asked = Rig(mode), list[list[int]]()
    rig.prefetcher.begin(0)
    assert rig.verify(0, [[0, 1]], following_of({2: 1.0}, asked)) == []
    assert asked == []


def test_probable_guesses_stay() -> None:
    """The policy hears of them, all that is to be known of that pass, and prefetches or not."""
    rig = Rig(Mode.THREE_PHASE, slots=LAYERS * EXPERTS)
    guess_and_verify(rig, {2: 2.1, 3: 2.2, 4: 1.0}, [2, 3])
    rig.policy.told.clear()
    guess_and_verify(rig, {2: 2.1, 7: 2.2, 4: 1.0}, [2, 3])
    assert rig.policy.told == [(1, [7, 2], 1.0)]


def test_what_is_evicted_unused_is_wasted() -> None:
    rig = Rig(Mode.THREE_PHASE, slots=2)
    rig.prefetcher.begin(3)
    rig.draft(2, 0, {1: 0.5, 2: 0.5})
    rig.arrive()
    list(rig.prefetcher.serve(0, [1]))  # the other was named for nothing
    list(rig.prefetcher.serve(1, [4]))
    list(rig.prefetcher.serve(2, [5]))
    assert (rig.recorder.step.used, rig.recorder.step.wasted) == (1, 1)
    assert rig.recorder.step.by_layer[0].wasted == 1
    assert ExpertKey(0, 2) not in rig.supply.cache


@pytest.mark.parametrize("mode", [None, *Mode])
@pytest.mark.parametrize("policy", CACHE_POLICIES.names)
@pytest.mark.parametrize("slots", [1, 2, 5, 13, 36])
def test_every_verification_is_served(mode: Mode | None, policy: str, slots: int) -> None:
    """Random drafts and guesses, right and wrong, over transfers that end when they like."""
    rng = random.Random(slots)
    transfer, recorder = FakeTransfer(rng), Recorder()
    of_slots = eviction_policy(policy, slots, LAYERS, EXPERTS)
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
    cache = supply.cache
    assert cache.free_slots + len(cache) + supply.under_way == slots
    prefetched = sum(priority is Priority.PREFETCH for _, priority in transfer.asked)
    if mode is None:
        assert prefetched == 0
    elif slots > LAYERS:
        assert prefetched > 0
