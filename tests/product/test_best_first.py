"""A draft's tree as it grows, by hand and against every tree that could have been."""

import random

import pytest

from speq.engine.draft import Draft, Outcome
from speq.engine.drafters.best_first import LEAST_ACCEPT_PROB, BestFirst
from speq.engine.drafters.next_token import Alternative, Chosen

# What stands how often, by its lead.
STANDS = {3.0: 0.9, 1.0: 0.7, 0.1: 0.5, -0.1: 0.4, -1.0: 0.2, -3.0: 0.001}


def never(token_id: int) -> bool:
    return False


def test_the_likeliest_token_is_run_next() -> None:
    growing = BestFirst(lambda logit_margin: STANDS[logit_margin])
    growing.found(0, Chosen(7, 0.1, (Alternative(8, 0.1), Alternative(9, 3.0))))
    best = growing.best(never)
    assert best is not None
    assert (best.token_id, best.parent, best.logit_margin, -best.unlikely) == (7, 0, 0.1, 0.5)
    assert growing.grow(best) == 1
    assert growing.as_last().parents == (-1, 0)
    assert growing.as_last().rows == 1
    growing.found(1, Chosen(5, 1.0, (Alternative(6, 1.0),)))
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
    assert draft.logit_margins == [0.1, 1.0, -0.1, -1.0]
    assert (draft.depth, draft.nodes, draft.is_chain) == (2, 5, False)
    assert draft.accept_prob(lambda logit_margin: STANDS[logit_margin]) == pytest.approx(
        [1.0, 0.5, 0.35, 0.4, 0.1]
    )


def test_what_is_hardly_ever_reached_is_left_out() -> None:
    growing = BestFirst(lambda logit_margin: STANDS[logit_margin])
    growing.found(0, Chosen(7, 3.0, (Alternative(8, 1.0), Alternative(9, 3.0))))
    draft = growing.finished(63)
    assert draft.token_ids == [7, 8]
    assert STANDS[-3.0] < LEAST_ACCEPT_PROB


def test_one_choice_alone_makes_a_chain() -> None:
    growing = BestFirst(lambda logit_margin: 0.7)
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
        growing = BestFirst(lambda logit_margin: STANDS[logit_margin])
        accept_prob = {(): 1.0}
        above: list[tuple[int, ...]] = [()]
        node = 0
        for turn in range(rng.randint(1, 6)):
            tokens = rng.sample(range(100), 3)
            logit_margins = [rng.choice([0.1, 1.0, 3.0]), -0.1, -1.0]
            others = tuple(
                Alternative(t, -b) for t, b in zip(tokens[1:], logit_margins[1:], strict=True)
            )
            growing.found(node, Chosen(tokens[0], logit_margins[0], others))
            for token, logit_margin in zip(tokens, logit_margins, strict=True):
                accept_prob[*above[node], token] = accept_prob[above[node]] * STANDS[logit_margin]
            if turn < 5:
                best = growing.best(never)
                assert best is not None
                left = {path: chance for path, chance in accept_prob.items() if path not in above}
                assert -best.unlikely == pytest.approx(max(left.values()))
                above.append((*above[best.parent], best.token_id))
                node = growing.grow(best)
        run = len(growing.draft.token_ids)
        draft = growing.finished(run + 4)
        left = [chance for path, chance in accept_prob.items() if path not in above]
        wanted = sorted((chance for chance in left if chance >= LEAST_ACCEPT_PROB), reverse=True)[
            :4
        ]
        found = draft.accept_prob(lambda logit_margin: STANDS[logit_margin])[run + 1 :]
        assert found == pytest.approx(wanted)
        for at, parent in enumerate(draft.parents, start=1):
            assert parent < at


def test_what_is_seen_beyond_a_node_lies_behind_its_leaves() -> None:
    """The token after the next, by one pass: behind each of that node's leaves, and no other's."""
    stands = STANDS | {None: 0.6}
    growing = BestFirst(lambda logit_margin: stands[logit_margin])
    growing.found(0, Chosen(7, 1.0, (Alternative(8, 0.1),)), beyond=5)
    best = growing.best(never)
    assert best is not None
    assert growing.grow(best) == 1
    growing.found(1, Chosen(9, 0.1), beyond=None)
    draft = growing.finished(5)
    # 7 was run, and says itself what follows it: 0.7 * 0.5 before 0.4 * 0.6.
    assert (draft.token_ids, draft.parents) == ([7, 8, 9, 5], [0, 0, 1, 2])
    assert draft.logit_margins == [1.0, -0.1, 0.1, None]


def test_what_is_learnt_of_a_tree() -> None:
    """Every token behind those that stand was tried; no other one was."""
    draft = Draft([5, 6, 7, 8, 9], [0, 0, 1, 2, 2], [1.0, -0.1, 3.0, 0.1, -1.0])
    outcome = Outcome([0, 2, 5], [6, 9, 4])
    assert [*draft.tried(outcome)] == [(1.0, False), (-0.1, True), (0.1, False), (-1.0, True)]
    # The right one may have been given up.
    assert [*draft.tried(Outcome([0], [6]))] == [(1.0, False), (-0.1, True)]
    assert [*Draft([5], [0]).tried(Outcome([0, 1], [5, 2]))] == []
