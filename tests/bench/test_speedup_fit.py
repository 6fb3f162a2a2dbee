"""MoESD's Algorithm 1, fitted to data that it did not make."""

import random
import sys
from dataclasses import fields

import pytest

from bench.lab.speedup_fit import (
    Measurement,
    SpeedupParameters,
    fit_speedup,
    modelled_speedup,
    roofline_time,
)
from speq import SpeqError


def test_the_roofline_of_a_pass_is_flat_and_then_rises() -> None:
    assert roofline_time(1, 32, 2.0) == pytest.approx(32, abs=1e-6)
    assert roofline_time(1000, 32, 2.0) == pytest.approx(1000)
    assert roofline_time(32, 32, 2.0) == 33  # log2(2^32 + 2^32)
    times = [roofline_time(t, 32, 1.1) for t in range(1, 200)]
    assert times == sorted(times)


TRUE = SpeedupParameters(
    bias=1.0,
    token=0.02,
    expert=0.08,
    load=0.05,
    draft_bias=0.3,
    draft_token=0.003,
    reject_bias=0.05,
    reject_token=0.002,
    ridge=24.0,
    sharpness=1.2,
)
SHAPES = ((60, 4), (64, 8), (16, 2), (8, 2))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def settings() -> list[Measurement]:
    return [
        Measurement(batch, draft_length, top_k, num_experts, 0.8, 0.0)
        for num_experts, top_k in SHAPES
        for batch in BATCHES
        for draft_length in (1, 2, 4, 6)
    ]


def test_a_fit_recovers_known_parameters_from_noisy_speedups() -> None:
    rng = random.Random(3)
    measured = [
        m._replace(speedup=modelled_speedup(TRUE, m) * rng.lognormvariate(0, 0.01))
        for m in settings()
    ]
    found = fit_speedup(measured)
    # Predictions are closer to the truth than the noise, also where nothing was measured.
    for m in [*settings(), Measurement(12, 3, 4, 128, 0.6, 0.0)]:
        assert modelled_speedup(found, m) == pytest.approx(modelled_speedup(TRUE, m), rel=0.02)
    for name in ("ridge", "expert"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.3), name


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(SpeqError, match="8 measurements were given; the speed-up model has 9"):
        fit_speedup(settings()[:8])
    assert len(fields(SpeedupParameters)) == 10


def test_a_fit_without_scipy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SpeqError, match=r"scipy, which is not installed; pip install scipy"):
        fit_speedup([])


def test_sparser_models_gain_more_at_moderate_batches() -> None:
    """The slides' finding: equal experts, fewer of them a token."""

    def gain(top_k: int, batch: int) -> float:
        return modelled_speedup(TRUE, Measurement(batch, 4, top_k, 64, 0.9, 0.0))

    gains = [gain(top_k, 64) for top_k in (4, 8, 16, 32)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.2 * gains[-1]
    # What verifying reads is read anyway from a batch on that is the larger, the sparser a model.
    tops = [max(BATCHES[3:], key=lambda b: gain(k, b)) for k in (2, 4, 8, 16)]
    assert tops == sorted(tops, reverse=True)
    assert tops[0] > tops[-1]
    assert tops[0] < BATCHES[-1]
