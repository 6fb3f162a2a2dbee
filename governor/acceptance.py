"""How likely drafted tokens are to stand, by their position in the draft (MoE-SpeQ 3.2.2)."""

import math
from dataclasses import dataclass, field

# Tokens that an average remembers at most: until then it is the mean (the warm-up), from then on an
# exponential moving average.
HORIZON = 80.0
# What is believed before anything was seen, as so many tokens of it.
PRIOR, PRIOR_TOKENS = 0.7, 2.0
# What was measured of other texts, as so many tokens.
KNOWN_TOKENS = 16.0
# A position of its own counts once it has been seen so often; until then all positions together do.
SHRINKAGE = 8.0
# A cycle takes away so much of what is known: texts change.
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


@dataclass(slots=True)
class Acceptance:
    """p_i: the probability that the draft's token i stands, given that those before it did.

    A draft of k tokens of which a < k stood says of its first a positions that they stood, of
    the next one that it did not, and nothing of those behind it. One that stood as a whole is
    censored: nothing failed.
    """

    longest: int
    _all: _Share = field(default_factory=lambda: _Share(PRIOR_TOKENS, PRIOR * PRIOR_TOKENS))
    _positions: list[_Share] = field(init=False)

    def __post_init__(self) -> None:
        self._positions = [_Share() for _ in range(self.longest)]

    def believe(self, acceptance: float) -> None:
        """Begin with what was measured before."""
        self._all = _Share(KNOWN_TOKENS, acceptance * KNOWN_TOKENS)

    def observe(self, draft_length: int, accepted: int) -> None:
        """Learn from a cycle; one without a draft only lets time pass."""
        self._all.fade()
        for share in self._positions:
            share.fade()
        tried = min(accepted + 1, draft_length)
        if tried:
            self._all.add(tried, accepted)
        for position, share in enumerate(self._positions[:tried]):
            share.add(1, position < accepted)

    @property
    def overall(self) -> float:
        """Of all positions together."""
        return self._all.stood / self._all.tokens

    @property
    def deviation(self) -> float:
        """Standard deviation of what is known of `overall`; it grows while nothing is drafted."""
        overall = self.overall
        return math.sqrt(max(overall * (1 - overall), 0.02) / (self._all.tokens + 1))

    def probabilities(self) -> list[float]:
        """p_1 to p_longest."""
        prior = SHRINKAGE * self.overall
        return [(share.stood + prior) / (share.tokens + SHRINKAGE) for share in self._positions]
