"""How likely drafted tokens are to stand, by their leads."""

import math
import random

import pytest

from speq.governor.confidence import BOUNDS, HORIZON, PRIOR_TOKENS, Confidence

# A lead in each class of tokens that a draft chooses; those of others lie opposite.
LEADS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.7, 1.5, math.inf)


def learn(confidence: Confidence, logit_margins: list[float | None], accepted: int) -> None:
    """From a chain of which so many tokens stood."""
    for position, logit_margin in enumerate(logit_margins[: accepted + 1]):
        confidence.learn(logit_margin, position < accepted)


def test_at_first_clear_choices_are_trusted() -> None:
    assumed = [Confidence().probability(logit_margin) for logit_margin in LEADS]
    assert 2 * len(assumed) == len(BOUNDS) + 1
    assert assumed == sorted(assumed)
    assert 0.5 < assumed[0] < 0.6
    assert assumed[-1] > 0.99
    others = [Confidence().probability(-logit_margin) for logit_margin in LEADS]
    assert others == pytest.approx([1 - stands for stands in assumed])


def test_tokens_of_one_class_say_nothing_of_others() -> None:
    confidence, untold = Confidence(), Confidence()
    for _ in range(50):
        confidence.learn(-0.05, True)
    assert confidence.probability(-0.05) > 0.9
    for logit_margin in (*LEADS, -0.01, -0.1, -math.inf, None):
        assert confidence.probability(logit_margin) == untold.probability(logit_margin)


def test_tokens_behind_a_wrong_one_say_nothing() -> None:
    confidence, untold = Confidence(), Confidence()
    learn(confidence, [1.5, 0.3, 0.1, 0.01], accepted=1)
    stood = PRIOR_TOKENS * untold.probability(1.5) + 1
    assert confidence.probability(1.5) == pytest.approx(stood / (PRIOR_TOKENS + 1))
    failed = PRIOR_TOKENS * untold.probability(0.3)
    assert confidence.probability(0.3) == pytest.approx(failed / (PRIOR_TOKENS + 1))
    for logit_margin in (0.1, 0.01, None):
        assert confidence.probability(logit_margin) == untold.probability(logit_margin)
    learn(confidence, [], accepted=0)
    assert confidence.probability(None) == untold.probability(None)


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.8])
def test_probabilities_become_what_is_observed(scale: float) -> None:
    """Of drafts whose tokens stand as a logistic function of their leads has it."""
    rng, confidence = random.Random(3), Confidence()
    for _ in range(3000):
        logit_margins = [rng.choice(LEADS[:-1]) for _ in range(4)]
        accepted = 0
        while accepted < 4 and rng.random() < 1 / (1 + math.exp(-logit_margins[accepted] / scale)):
            accepted += 1
        learn(confidence, [*logit_margins], accepted)
    for logit_margin in LEADS[:-1]:
        stands = 1 / (1 + math.exp(-logit_margin / scale))
        # So many tokens are remembered: four deviations of their mean.
        deviation = math.sqrt(max(stands * (1 - stands), 0.01) / HORIZON)
        assert confidence.probability(logit_margin) == pytest.approx(stands, abs=4 * deviation)


def test_a_drafter_that_knows_no_leads_has_its_acceptance() -> None:
    rng, confidence = random.Random(4), Confidence()
    for _ in range(500):
        accepted = 0
        while accepted < 3 and rng.random() < 0.4:
            accepted += 1
        learn(confidence, [None] * 3, accepted)
    assert confidence.probability(None) == pytest.approx(0.4, abs=0.15)


def test_what_was_long_ago_is_forgotten() -> None:
    confidence = Confidence()
    for _ in range(1000):
        learn(confidence, [0.3], accepted=1)
    for _ in range(round(3 * HORIZON)):
        learn(confidence, [0.3], accepted=0)
    assert confidence.probability(0.3) < 0.06
