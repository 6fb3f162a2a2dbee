"""MoESD's model: by hand and by simulation."""

import random

import pytest

from speq import SpeqError
from speq.governor.speedup_model import activated_experts, distinct_of_routes, target_efficiency


def test_activated_experts_by_hand() -> None:
    assert activated_experts(8, 2, 0) == 0
    assert activated_experts(8, 2, 1) == 2
    assert activated_experts(8, 2, 2) == 3.5  # 8 (1 - 9/16)
    assert activated_experts(8, 8, 3) == 8
    assert activated_experts(64, 6, 10**6) == pytest.approx(64)


def test_activated_experts_are_those_of_random_routes() -> None:
    rng = random.Random(0)
    tokens, rounds = 9, 3000
    total = sum(
        len({e for _ in range(tokens) for e in rng.sample(range(32), 4)}) for _ in range(rounds)
    )
    assert activated_experts(32, 4, tokens) == pytest.approx(total / rounds, rel=0.01)


def test_target_efficiency_by_hand() -> None:
    assert target_efficiency(2.0, 4.0) == 0.5


def test_measured_routes_replace_independence() -> None:
    # Two layers, four tokens, one expert each.
    found = distinct_of_routes([[[0], [0], [1], [1]], [[0], [1], [2], [3]]], 4, 2)
    assert found.measured == ((1, 1.0), (2, 1.5))
    assert found.independent(2) == 1.75
    with pytest.raises(SpeqError, match="windows of 5 tokens were asked for and there are 4"):
        distinct_of_routes([[[0]] * 4], 4, 5)
