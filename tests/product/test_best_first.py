"""A draft's tree as it grows, by hand and against every tree that could have been."""

import random

import pytest

from speq.decode.drafters.best_first import LEAST_REACH, BestFirst
from speq.decode.drafters.next_token import Chosen, Other
from speq.decode.sequence import Draft, Outcome

# What stands how often, by its lead.
STANDS = {3.0: 0.9, 1.0: 0.7, 0.1: 0.5, -0.1: 0.4, -1.0: 0.2, -3.0: 0.001}


def never(token_id: int) -> bool:
    return False


def test_the_likeliest_token_is_run_next() -> None:
    growing = BestFirst(lambda lead: STANDS[lead])
    growing.found(0, Chosen(7, 0.1, (Other(8, 0.1), Other(9, 3.0))))
    best = growing.best(never)
    assert best is not None
    assert (best.token_id, best.parent, best.lead, -best.unlikely) == (7, 0, 0.1, 0.5)
    assert growing.grow(best) == 1
    assert growing.as_last().parents == (-1, 0)
    assert growing.as_last().rows == 1
    growing.found(1, Chosen(5, 1.0, (Other(6, 1.0),)))
    # 0.5 * 0.7 falls behind the sibling's 0.4.
    best = growing.best(never)
    assert best is not None
    assert (best.token_id, best.parent) == (8, 0)
    # One that ends the text is drafted, and not run.
    best = growing.best(lambda token_id: token_id == 8)
    assert best is not None
    assert (best.token_id, best.parent) == (5, 1)
    assert growing.grow(best) == 2
    draft = growing.finished(4)
    assert (draft.token_ids, draft.parents) == ([7, 5, 8, 6], [0, 1, 0, 1])
    assert draft.leads == [0.1, 1.0, -0.1, -1.0]
    assert (draft.depth, draft.nodes, draft.is_chain) == (2, 5, False)
    assert draft.reach(lambda lead: STANDS[lead]) == pytest.approx([1.0, 0.5, 0.35, 0.4, 0.1])


def test_what_is_hardly_ever_reached_is_left_out() -> None:
    growing = BestFirst(lambda lead: STANDS[lead])
    growing.found(0, Chosen(7, 3.0, (Other(8, 1.0), Other(9, 3.0))))
    draft = growing.finished(63)
    assert draft.token_ids == [7, 8]
    assert STANDS[-3.0] < LEAST_REACH


def test_one_choice_alone_makes_a_chain() -> None:
    growing = BestFirst(lambda lead: 0.7)
    growing.found(0, Chosen(1, None))
    for node in range(1, 5):
        best = growing.best(never)
        assert best is not None
        assert growing.grow(best) == node
        growing.found(node, Chosen(node + 1, None))
    draft = growing.finished(8)
    assert draft.is_chain
    assert draft.token_ids == [1, 2, 3, 4, 5]
    assert growing.best(never) is None


def test_leaves_are_the_likeliest_of_all_candidates() -> None:
    """Against a list of all tokens that were ever found."""
    rng = random.Random(8)
    for _ in range(50):
        growing = BestFirst(lambda lead: STANDS[lead])
        reach = {(): 1.0}
        above: list[tuple[int, ...]] = [()]
        node = 0
        for turn in range(rng.randint(1, 6)):
            tokens = rng.sample(range(100), 3)
            leads = [rng.choice([0.1, 1.0, 3.0]), -0.1, -1.0]
            others = tuple(Other(t, -b) for t, b in zip(tokens[1:], leads[1:], strict=True))
            growing.found(node, Chosen(tokens[0], leads[0], others))
            for token, lead in zip(tokens, leads, strict=True):
                reach[*above[node], token] = reach[above[node]] * STANDS[lead]
            if turn < 5:
                best = growing.best(never)
                assert best is not None
                left = {path: chance for path, chance in reach.items() if path not in above}
                assert -best.unlikely == pytest.approx(max(left.values()))
                above.append((*above[best.parent], best.token_id))
                node = growing.grow(best)
        run = len(growing.draft.token_ids)
        draft = growing.finished(run + 4)
        left = [chance for path, chance in reach.items() if path not in above]
        wanted = sorted((chance for chance in left if chance >= LEAST_REACH), reverse=True)[:4]
        found = draft.reach(lambda lead: STANDS[lead])[run + 1 :]
        assert found == pytest.approx(wanted)
        for at, parent in enumerate(draft.parents, start=1):
            assert parent < at


def test_what_is_seen_beyond_a_node_lies_behind_its_leaves() -> None:
    """The token after the next, by one pass: behind each of that node's leaves, and no other's."""
    stands = STANDS | {None: 0.6}
    growing = BestFirst(lambda lead: stands[lead])
    growing.found(0, Chosen(7, 1.0, (Other(8, 0.1),)), beyond=5)
    best = growing.best(never)
    assert best is not None
    assert growing.grow(best) == 1
    growing.found(1, Chosen(9, 0.1), beyond=None)
    draft = growing.finished(5)
    # 7 was run, and says itself what follows it: 0.7 * 0.5 before 0.4 * 0.6.
    assert (draft.token_ids, draft.parents) == ([7, 8, 9, 5], [0, 0, 1, 2])
    assert draft.leads == [1.0, -0.1, 0.1, None]


def test_what_is_learnt_of_a_tree() -> None:
    """Every token behind those that stand was tried; no other one was."""
    draft = Draft([5, 6, 7, 8, 9], [0, 0, 1, 2, 2], [1.0, -0.1, 3.0, 0.1, -1.0])
    outcome = Outcome([0, 2, 5], [6, 9, 4])
    assert [*draft.tried(outcome)] == [(1.0, False), (-0.1, True), (0.1, False), (-1.0, True)]
    # The right one may have been given up.
    assert [*draft.tried(Outcome([0], [6]))] == [(1.0, False), (-0.1, True)]
    assert [*Draft([5], [0]).tried(Outcome([0, 1], [5, 2]))] == []
