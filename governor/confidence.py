"""Learns the acceptance probability of a drafted token from its logit margin.

A token is accepted if the exact model chooses the same one. Exact logits differ little from the
draft's, so the margin over the next token tells more than the probability: a token of probability
0.1 with a margin of 2 is accepted, and one of 0.45 next to another of 0.45 is a coin toss. Sampled
tokens are chosen by logits plus noise that draft and exact model share; their margin is that of the
sums, so it means the same as for greedy tokens.
"""

import math
from bisect import bisect
from dataclasses import dataclass, field
from itertools import pairwise

# Bounds between classes of margins, in logits. Margins of 0.1 decide among the INT4 drafts measured
# so far; drafts that are worse by powers of two have classes too. A token that is not the draft's
# choice has a margin below 0.
POSITIVE = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
BOUNDS = (*(-bound for bound in reversed(POSITIVE)), 0.0, *POSITIVE)
# Assumed first: acceptance is a logistic function of margin / SCALE, with the weight of this many
# tokens of each class. The scale is that of INT4 drafts.
SCALE, PRIOR_TOKENS = 0.1, 4.0
# Assumed for a token without a margin.
UNKNOWN = 0.7
# Tokens that a class remembers.
HORIZON = 100.0


def _prior(scale: float) -> list[float]:
    """Acceptance assumed for each class, at the middle of its margins."""
    edges = (2 * BOUNDS[0], *BOUNDS, 2 * BOUNDS[-1])
    middles = ((low + high) / 2 for low, high in pairwise(edges))
    return [1 / (1 + math.exp(-middle / scale)) for middle in middles]


@dataclass(slots=True)
class Confidence:
    """Acceptance probability of a drafted token, given those before it, by its logit margin.

    The margin is negative for a token that is not the draft's choice. None, of a drafter that has
    no margins, is a class of its own.
    """

    _accepted: list[float] = field(init=False)
    _tokens: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.assume(SCALE)

    def assume(self, scale: float) -> None:
        """Begin again with a drafter of this scale: the margin that 73 % of the time is enough."""
        prior = [*_prior(scale), UNKNOWN]
        self._tokens = [PRIOR_TOKENS] * len(prior)
        self._accepted = [PRIOR_TOKENS * probability for probability in prior]

    def probability(self, logit_margin: float | None) -> float:
        at = self._class(logit_margin)
        return self._accepted[at] / self._tokens[at]

    def learn(self, logit_margin: float | None, accepted: bool) -> None:
        """Count a token whose predecessors were all accepted."""
        at = self._class(logit_margin)
        kept = min(1.0, HORIZON / (self._tokens[at] + 1))
        self._tokens[at] = (self._tokens[at] + 1) * kept
        self._accepted[at] = (self._accepted[at] + accepted) * kept

    @staticmethod
    def _class(logit_margin: float | None) -> int:
        return len(BOUNDS) + 1 if logit_margin is None else bisect(BOUNDS, logit_margin)
