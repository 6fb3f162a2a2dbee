"""Which rows of a verification are given up: by hand, and against every closed set of rows."""

import random
from itertools import combinations

import pytest
import torch

from speq.governor.prices import Prices
from speq.routing import Route
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.row_pruning import (
    ExpectedValuePruning,
    RowPruner,
    RowValues,
    rows_worth_keeping,
)
from speq.stats import StepStats

PARENTS = [-1, 0, 0, 1, 1]


def keys(*experts: int, layer: int = 0) -> set[ExpertKey]:
    return {ExpertKey(layer, expert) for expert in experts}


@pytest.mark.parametrize(
    ("worth_s", "wanted", "later_s", "active_rows"),
    [
        # Nothing is missing.
        ([1, 0.5, 0.1, 0.4, 0.0], [(), (), (), (), ()], [0] * 5, [0, 1, 2, 3, 4]),
        # The pending token lives, whatever it costs.
        ([0, 0, 0, 0, 0], [(1, 2, 3), (), (), (), ()], [0] * 5, [0, 1, 2, 3, 4]),
        # One that costs 1 and is worth less dies; what others want as well costs nothing more.
        ([1, 0.5, 0.1, 0.4, 0.3], [(1,), (1,), (2,), (3,), (1,)], [0] * 5, [0, 1, 4]),
        # A parent dies with its children, which were worth their own.
        ([1, 0.1, 0.1, 1.5, 1.2], [(), (1, 2, 3, 4), (), (5,), (6,)], [0] * 5, [0, 2]),
        # Two siblings hold an expert together, which neither would drop; their parent can.
        ([1, 0.2, 1.0, 0.3, 0.3], [(), (), (), (7,), (7,)], [0] * 5, [0, 2]),
        # What is expected of later layers counts as well.
        ([1, 0.5, 0.5, 0.5, 0.5], [(), (), (), (), ()], [9, 0.4, 0.6, 0.6, 0.4], [0, 1, 4]),
    ],
)
def test_subtrees_die_by_hand(
    worth_s: list[float],
    wanted: list[tuple[int, ...]],
    later_s: list[float],
    active_rows: list[int],
) -> None:
    assert (
        rows_worth_keeping(PARENTS, worth_s, [keys(*each) for each in wanted], 1.0, later_s)
        == active_rows
    )


def gain(
    active_rows: tuple[int, ...],
    worth_s: list[float],
    wanted: list[set[ExpertKey]],
    expert_s: float,
) -> float:
    asked = set().union(*(wanted[node] for node in active_rows))
    return sum(worth_s[node] for node in active_rows) - expert_s * len(asked)


def test_what_dies_is_no_loss() -> None:
    """Never worse than keeping all, closed under parents, and mostly the best of closed sets."""
    rng = random.Random(12)
    best_of, trials = 0, 200
    for _ in range(trials):
        count = rng.randint(1, 7)
        parents = [-1, *(rng.randrange(node) for node in range(1, count))]
        wanted = [keys(*rng.sample(range(9), rng.randint(0, 3))) for _ in range(count)]
        worth = [rng.random() for _ in range(count)]
        active_rows = tuple(rows_worth_keeping(parents, worth, wanted, 0.4, [0.0] * count))
        assert active_rows[0] == 0
        assert all(parents[node] in active_rows for node in active_rows[1:])
        reached = gain(active_rows, worth, wanted, 0.4)
        assert reached >= gain(tuple(range(count)), worth, wanted, 0.4) - 1e-9
        closed = (
            (0, *rest)
            for size in range(count)
            for rest in combinations(range(1, count), size)
            if all(parents[node] in (0, *rest) for node in rest)
        )
        best = max(gain(each, worth, wanted, 0.4) for each in closed)
        assert reached <= best + 1e-9
        best_of += reached > best - 1e-9
    assert best_of > 0.8 * trials


def row_values(expert_s: float = 1.0, token_s: float = 2.0) -> RowValues:
    return RowValues(PARENTS, [1.0, 0.9, 0.3, 0.6, 0.2], expert_s, token_s)


def test_nothing_dies_while_experts_cost_nothing() -> None:
    policy, rows = ExpectedValuePruning(3), [0, 1, 2, 3, 4]
    missing = [keys(node) for node in rows]
    assert policy.active_rows(row_values(expert_s=0.0), rows, 0, missing, lambda node: True) == rows
    # 0.9 + 0.6 and 0.2 tokens of 2 s against 1 s each: the last two do not earn theirs.
    assert policy.active_rows(row_values(), rows, 0, missing, lambda node: True) == [0, 1, 3]


def test_unnamed_rows_are_expected_to_go_on_as_usual() -> None:
    rows = [0, 1, 2]
    three = RowValues([-1, 0, 0], [1.0, 0.7, 0.7], 1.0, 2.0)
    missing = [keys(), keys(1), keys(2)]

    def named(node: int) -> bool:
        return node == 1

    # One expert a layer: a token of 1.4 s is worth one of them, and not one in each of 10 layers.
    assert ExpectedValuePruning(1).active_rows(three, rows, 0, missing, named) == rows
    assert ExpectedValuePruning(10).active_rows(three, rows, 0, missing, named) == [0, 1]
    assert ExpectedValuePruning(10).active_rows(three, rows, 9, missing, named) == rows
    # Layers in which nothing was missing count.
    policy = ExpectedValuePruning(10)
    for _ in range(100):
        policy.active_rows(three, rows, 0, [keys()] * 3, named)
    assert policy.active_rows(three, rows, 0, missing, named) == rows


class Held:
    """A supply in which some experts lie."""

    def __init__(self, held: set[ExpertKey]) -> None:
        self._held = held

    def missing(self, layer: int, experts: list[int]) -> set[ExpertKey]:
        return {ExpertKey(layer, expert) for expert in experts} - self._held


def route(*ids: list[int]) -> Route:
    return Route(torch.tensor(ids), torch.ones(len(ids), len(ids[0])))


def test_rows_stay_dead_in_the_layers_behind() -> None:
    lookahead = LookaheadBuffer(2)
    rows = RowPruner(Held(keys(0, 1) | keys(0, 1, layer=1)), lookahead, ExpectedValuePruning(2))  # type: ignore[arg-type]
    rows.begin(RowValues([-1, 0, 0], [1.0, 0.9, 0.1], 1.0, 2.0))
    first, second = route([0, 1], [1, 0], [0, 5]), route([0, 1], [0, 1], [0, 1])
    rows.observe(0, first)
    assert first.active_rows == (0, 1)
    assert [*first.rows] == [0, 1]
    rows.observe(1, second)
    assert second.active_rows == (0, 1)
    assert second.arrays[0].tolist() == [[0, 1], [0, 1]]
    assert rows.end() == [0, 1]
    # Passes that nobody announced, such as those of measurements, keep all their rows.
    rows.observe(0, other := route([0, 9], [9, 8], [7, 6]))
    assert other.active_rows is None
    assert [*other.rows] == [0, 1, 2]


def test_what_the_draft_names_for_later_layers_counts() -> None:
    lookahead = LookaheadBuffer(2)
    lookahead.record(1, 0, route([0, 1]))
    lookahead.record(1, 1, route([4, 5]))
    held = Held(keys(0, 1) | keys(0, 1, layer=1))
    found = []
    for expert in (1, 6):  # nothing is looked up as long as nothing is missing
        rows = RowPruner(held, lookahead, ExpectedValuePruning(2))  # type: ignore[arg-type]
        rows.begin(RowValues([-1, 0], [1.0, 0.9], 1.0, 2.0))
        rows.observe(0, route([0, 1], [0, expert]))
        found.append(rows.end())
    assert found == [[0, 1], [0]]


def test_prices_are_those_of_finished_steps() -> None:
    prices = Prices()
    assert (prices.expert_s, prices.token_s) == (0.0, 0.0)
    for _ in range(3):
        prices.observe(StepStats("decode", start_s=1.0, end_s=1.5, emitted=2))
        step = StepStats("decode", start_s=2.0, end_s=3.0, emitted=4, moved=10)
        step.link_s, step.exposed_s = 0.5, 0.25
        prices.observe(step)
    assert prices.token_s == pytest.approx(0.25, rel=0.05)
    assert prices.expert_s == pytest.approx(0.025)


def test_experts_on_the_host_have_a_price_as_well() -> None:
    """Six were copied, with 0.25 s of waiting, while the host computed four in half a second."""
    prices = Prices()
    step = StepStats("decode", end_s=1.0, emitted=2, moved=6, host_experts=4, host_s=0.5)
    step.link_s, step.exposed_s = 0.5, 0.25
    prices.observe(step)
    assert prices.expert_s == pytest.approx(0.05)
