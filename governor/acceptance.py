"""Learns the tokens that a draft yields, position by position (MoE-SpeQ 3.2.2)."""

import math
from dataclasses import dataclass, field

# An average remembers at most so many tokens. Until then it is the mean (the warm-up); from then on
# it is an exponential moving average.
HORIZON = 80.0
# The acceptance assumed first, and the number of tokens it weighs as much as.
PRIOR, PRIOR_TOKENS = 0.7, 2.0
# It never weighs less than so many: a weight that has faded for days says nothing any more.
LEAST_TOKENS = 1e-9
# All positions together weigh as much as so many tokens of one position.
SHRINKAGE = 8.0
# Each cycle takes away this share of the weight: texts change.
FADING = 1 / 250


@dataclass(slots=True)
class _Share:
    """A decayed share of tokens that stood."""

    tokens: float = 0.0
    stood: float = 0.0

    def add(self, tokens: float, stood: float) -> None:
        kept = min(1.0, HORIZON / (self.tokens + tokens))
        self.tokens = (self.tokens + tokens) * kept
        self.stood = (self.stood + stood) * kept

    def fade(self) -> None:
        self.tokens *= 1 - FADING
        self.stood *= 1 - FADING

    @property
    def value(self) -> float:
        """Above 0, whatever was seen: what is forgotten is as it was assumed first."""
        return (self.stood + LEAST_TOKENS * PRIOR) / (self.tokens + LEAST_TOKENS)


@dataclass(slots=True)
class Acceptance:
    """p_i: the probability that a draft has a token i and that it stands, given that those before
    it did.

    Let a of a draft's k tokens stand. If a < k, the first a positions stood and the next one
    failed; the draft says nothing of later positions. If a = k, nothing failed, but for a draft
    that was stopped: that has no next token, and one was decided on.
    """

    longest: int
    # Of the tokens that were drafted.
    _drafted: _Share = field(default_factory=lambda: _Share(PRIOR_TOKENS, PRIOR * PRIOR_TOKENS))
    _all: _Share = field(default_factory=lambda: _Share(PRIOR_TOKENS, PRIOR * PRIOR_TOKENS))
    _positions: list[_Share] = field(init=False)

    def __post_init__(self) -> None:
        self._positions = [_Share() for _ in range(self.longest)]

    def believe(self, acceptance: float, tokens: float) -> None:
        """Begin with an acceptance that weighs as much as so many tokens."""
        self._all = _Share(tokens, acceptance * tokens)
        self._drafted = _Share(tokens, acceptance * tokens)

    def observe(self, draft_length: int, accepted: int, stopped: bool = False) -> None:
        """Learn from a cycle; one without a draft only lets time pass.

        stopped  whether the draft ended before the length decided on
        """
        self._all.fade()
        self._drafted.fade()
        for share in self._positions:
            share.fade()
        drafted = min(accepted + 1, draft_length)
        if drafted:
            self._drafted.add(drafted, accepted)
        tried = min(accepted + 1, draft_length + stopped)
        if tried:
            self._all.add(tried, accepted)
        for position, share in enumerate(self._positions[:tried]):
            share.add(1, position < accepted)

    @property
    def accepted(self) -> float:
        """The share of drafted tokens that stand, given that those before them did."""
        return self._drafted.value

    @property
    def overall(self) -> float:
        """p_i of all positions together."""
        return self._all.value

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimate `overall`; it grows while nothing is drafted."""
        overall = self.overall
        return math.sqrt(max(overall * (1 - overall), 0.02) / (self._all.tokens + 1))

    def probabilities(self) -> list[float]:
        """p_1 to p_longest."""
        prior = SHRINKAGE * self.overall
        return [(share.stood + prior) / (share.tokens + SHRINKAGE) for share in self._positions]
