"""Learns the acceptance probability of drafted tokens by position (MoE-SpeQ 3.2.2)."""

import math
from dataclasses import dataclass, field

# Tokens that an average remembers. Up to then it is the mean (the warm-up); afterwards it is an
# exponential moving average.
HORIZON = 80.0
# Acceptance assumed first, and its weight in tokens.
PRIOR, PRIOR_TOKENS = 0.7, 2.0
# Least weight of the assumption, so that no share is ever 0 / 0.
LEAST_TOKENS = 1e-9
# Weight of the mean over all positions, in tokens of one position.
SHRINKAGE = 8.0
# Share of the weight that each step removes, since sequences change.
FADING = 1 / 250


@dataclass(slots=True)
class _Share:
    """A decayed share of accepted tokens."""

    tokens: float = 0.0
    accepted: float = 0.0

    def add(self, tokens: float, accepted: float) -> None:
        kept = min(1.0, HORIZON / (self.tokens + tokens))
        self.tokens = (self.tokens + tokens) * kept
        self.accepted = (self.accepted + accepted) * kept

    def fade(self) -> None:
        self.tokens *= 1 - FADING
        self.accepted *= 1 - FADING

    @property
    def value(self) -> float:
        """The share, always above 0; without tokens it is the prior."""
        return (self.accepted + LEAST_TOKENS * PRIOR) / (self.tokens + LEAST_TOKENS)


@dataclass(slots=True)
class Acceptance:
    """p_i: the probability that a draft has a token i and it is accepted, given those before it.

    Let a of a draft's k tokens be accepted. If a < k, the first a positions succeeded and the next
    one failed; later positions are unknown. If a = k, nothing failed, except that a stopped draft
    lacks its next token.
    """

    longest: int
    # Tokens that were drafted.
    _drafted: _Share = field(default_factory=lambda: _Share(PRIOR_TOKENS, PRIOR * PRIOR_TOKENS))
    _all: _Share = field(default_factory=lambda: _Share(PRIOR_TOKENS, PRIOR * PRIOR_TOKENS))
    _positions: list[_Share] = field(init=False)

    def __post_init__(self) -> None:
        self._positions = [_Share() for _ in range(self.longest)]

    def believe(self, acceptance: float, tokens: float) -> None:
        """Begin with an acceptance that has the weight of `tokens` tokens."""
        self._all = _Share(tokens, acceptance * tokens)
        self._drafted = _Share(tokens, acceptance * tokens)

    def observe(self, draft_length: int, accepted: int, stopped: bool = False) -> None:
        """Learn from a step; one without a draft only decays the weights.

        stopped  True if the draft ended before the chosen length
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
        """Share of drafted tokens that are accepted, given those before them."""
        return self._drafted.value

    @property
    def overall(self) -> float:
        """Mean p_i over all positions."""
        return self._all.value

    @property
    def deviation(self) -> float:
        """Standard deviation of `overall`; it grows while nothing is drafted."""
        overall = self.overall
        return math.sqrt(max(overall * (1 - overall), 0.02) / (self._all.tokens + 1))

    def probabilities(self) -> list[float]:
        """Return p_1 to p_longest."""
        prior = SHRINKAGE * self.overall
        return [(share.accepted + prior) / (share.tokens + SHRINKAGE) for share in self._positions]
