"""Learns how likely a drafted token is to stand by how clearly the draft chose it.

A token stands if the exact model chooses the same one. Exact logits differ from the draft's by a
little, so the lead of the chosen token over the next one tells more than its probability: a token
of probability 0.1 that leads by 2 stands, and one of 0.45 beside another of 0.45 is a coin's throw.
Drawn tokens are chosen by logits plus noise that draft and exact model share, and their lead is
that of the sums. So the lead means the same for greedy and drawn tokens.
"""

import math
from bisect import bisect
from dataclasses import dataclass, field
from itertools import pairwise

# Bounds between classes of leads, in logits. Leads of 0.1 decide among the INT4 copies measured so
# far; copies that are worse by powers of two have classes as well. A token that is not the draft's
# choice has a lead below 0.
AHEAD = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
BOUNDS = (*(-bound for bound in reversed(AHEAD)), 0.0, *AHEAD)
# First assumed: a token that leads by x stands as often as a logistic function of x / SCALE says.
# It weighs as much as so many tokens of a class. The scale is that of INT4 copies.
SCALE, PRIOR_TOKENS = 0.1, 4.0
# Assumed of a token whose drafter says nothing of it.
UNKNOWN = 0.7
# A class remembers at most so many tokens.
HORIZON = 100.0


def _assumed(scale: float) -> list[float]:
    """By class, at the middle of its leads."""
    edges = (2 * BOUNDS[0], *BOUNDS, 2 * BOUNDS[-1])
    middles = ((low + high) / 2 for low, high in pairwise(edges))
    return [1 / (1 + math.exp(-middle / scale)) for middle in middles]


@dataclass(slots=True)
class Confidence:
    """The probability that a drafted token stands if those before it do, by its lead.

    A lead is in logits, and below 0 for a token that is behind the draft's choice. None is that of
    a drafter that does not know it: a class of its own.
    """

    _stood: list[float] = field(init=False)
    _tokens: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.assume(SCALE)

    def assume(self, scale: float) -> None:
        """Begin anew with a drafter whose leads, in logits, mean as much as `scale` says: by which
        a token must lead to stand in 73 of 100 cases.
        """
        assumed = [*_assumed(scale), UNKNOWN]
        self._tokens = [PRIOR_TOKENS] * len(assumed)
        self._stood = [PRIOR_TOKENS * probability for probability in assumed]

    def probability(self, logit_margin: float | None) -> float:
        at = self._class(logit_margin)
        return self._stood[at] / self._tokens[at]

    def learn(self, logit_margin: float | None, stood: bool) -> None:
        """Count a token behind tokens that stand. Others say nothing."""
        at = self._class(logit_margin)
        kept = min(1.0, HORIZON / (self._tokens[at] + 1))
        self._tokens[at] = (self._tokens[at] + 1) * kept
        self._stood[at] = (self._stood[at] + stood) * kept

    @staticmethod
    def _class(logit_margin: float | None) -> int:
        return len(BOUNDS) + 1 if logit_margin is None else bisect(BOUNDS, logit_margin)
