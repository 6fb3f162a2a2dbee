"""Figures of the last steps, by steps made by hand."""

from dataclasses import astuple
from typing import Any

import pytest

from speq.dashboard.last_steps import WINDOW, LastFigures, LastSteps, figures_of
from speq.stats import StepStats


def step(start_s: float, end_s: float, **figures: Any) -> StepStats:
    return StepStats("decode", start_s=start_s, end_s=end_s, **figures)


def test_figures_are_averages_over_steps() -> None:
    steps = [
        step(
            1.0, 3.0, emitted=3, draft_length=4, accepted=2, requests=10, hits=9,
            moved_bytes=6 << 20, draft_s=0.5, verify_s=1.25, stall_s=0.25, link_s=1.0,
            exposed_s=0.25,
        ),
        step(
            4.0, 6.0, emitted=1, draft_length=0, accepted=0, requests=10, hits=6,
            moved_bytes=2 << 20, verify_s=1.75, stall_s=0.75, link_s=1.0, exposed_s=0.75,
        ),
    ]  # fmt: skip
    assert figures_of(17, steps) == LastFigures(
        tokens=17,
        steps=2,
        tpot_ms=1000.0,
        draft_length=2.0,
        acceptance_rate=0.5,
        hit_rate=0.75,
        moved_bytes_per_token=2 << 20,
        draft=0.125,
        verify=0.5,
        stall=0.25,
        rest=0.125,
        link_busy=0.5,
        hidden_share=0.5,
    )


def test_what_does_not_exist_is_none() -> None:
    assert figures_of(1, []) == LastFigures(tokens=1, steps=0)
    plain = figures_of(2, [step(0.0, 1.0, emitted=1, verify_s=1.0)])
    assert (plain.acceptance_rate, plain.hit_rate, plain.hidden_share) == (None, None, None)
    assert (plain.draft_length, plain.link_busy, plain.moved_bytes_per_token) == (0, 0, 0)


@pytest.mark.parametrize("stall_s", [0.5, 3.0])
def test_shares_add_up_to_one(stall_s: float) -> None:
    """Also where waiting and transfers of steps before are told of."""
    late = step(0.0, 1.0, emitted=1, draft_s=0.25, verify_s=0.75, stall_s=stall_s, link_s=4.0)
    found = figures_of(1, [late])
    shares = [found.draft, found.verify, found.stall, found.rest]
    assert all(share is not None and 0 <= share <= 1 for share in shares)
    assert sum(share or 0.0 for share in shares) == pytest.approx(1)
    assert found.link_busy == 1


def test_the_last_steps_of_a_run_are_kept() -> None:
    last = LastSteps()
    for run in (1, 2):
        last.hear(StepStats("prefill", emitted=1, end_s=9.0))
        assert astuple(last.figures)[:2] == (1, 0), run
        for at in range(WINDOW + 3):
            last.hear(step(at, at + 1 + at, emitted=2))
    found = last.figures
    assert (found.tokens, found.steps) == (1 + 2 * (WINDOW + 3), WINDOW)
    kept = range(3, WINDOW + 3)
    assert found.tpot_ms == 1e3 * sum(at + 1 for at in kept) / (2 * WINDOW)
