"""MoESD's model: by hand and by simulation."""

import random

import pytest

from speq.governor.speedup_model import activated_experts, target_efficiency
from speq.measure.routes import distinct_experts


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
    routes = [
        [[0], [0], [1], [1]],
        [[0], [1], [2], [3]],
    ]  # two layers, four tokens, one expert each
    assert [distinct_experts(routes, tokens) for tokens in (1, 2)] == [1.0, 1.5]
    assert activated_experts(4, 1, 2) == 1.75
