"""Expects how many experts tokens ask for and how many of these are missing, before loading.

Both follow from one curve, D(t): the distinct experts of a layer that t consecutive tokens choose.
Let D(T) slots hold the experts of the last T tokens. The next t tokens together then miss
D(T + t) - D(T) experts. This is Denning's working-set theorem (Denning and Schwartz, 1972) for
windows. It is about LRU.
"""

import math
from dataclasses import dataclass, replace

from speq.errors import OptionError
from speq.governor.speedup_model import activated_experts

# Experts of a token that chooses none, so that logarithms exist.
RARELY = 1e-6


@dataclass(frozen=True, slots=True)
class RouteCurve:
    """D(t) as it was recorded.

    source  the model or text that was recorded
    points  (tokens, distinct experts of a layer) in rising order, the first one (1, top_k)
    """

    source: str
    num_experts: int
    top_k: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Raises SpeqError for points that no routes have."""
        tokens = [x for x, _ in self.points]
        distinct = [y for _, y in self.points]
        grows = tokens == sorted(set(tokens)) and distinct == sorted(set(distinct))
        if len(self.points) < 2 or self.points[0] != (1, self.top_k) or not grows:
            raise OptionError(
                f"the routes of {self.source} give distinct experts {self.points}; they must grow "
                f"with the number of tokens, from {self.top_k} for one"
            )
        if not distinct[-1] < self.num_experts:
            raise OptionError(
                f"the routes of {self.source} choose all {self.num_experts} experts of a layer; "
                "they say nothing of how tokens differ"
            )

    def independent_tokens(self, tokens: float) -> float:
        """The number of tokens that would choose as many experts if they chose independently."""
        if tokens <= 1:
            return tokens
        (left, low), (right, high) = self._between(0, tokens)
        return low + (high - low) * math.log(tokens / left) / math.log(right / left)

    def tokens(self, independent: float) -> float:
        """The inverse of `independent_tokens`."""
        if independent <= 1:
            return independent
        (left, low), (right, high) = self._between(1, independent)
        return left * math.exp(math.log(right / left) * (independent - low) / (high - low))

    def _between(self, axis: int, value: float) -> list[tuple[float, float]]:
        """The (tokens, independent tokens) on either side; beyond the last point, the last two."""
        stays = math.log(1 - self.top_k / self.num_experts)
        known = [(x, math.log(1 - y / self.num_experts) / stays) for x, y in self.points]
        at = 1
        while at < len(known) - 1 and known[at][axis] < value:
            at += 1
        return known[at - 1 : at + 1]


# Recorded with the bundled model: its eight layers over code, maths and prose.
#   python -m bench.lab.hit_rate models/tiny-moe --memory-budget 60MiB --num-prompts 8 \
#       --max-new-tokens 128 --routes routes.json
BUNDLED = RouteCurve(
    "the bundled model",
    32,
    4,
    (
        *((1, 4), (2, 6.55), (3, 8.4), (5, 10.77), (9, 13.58), (17, 16.51), (33, 18.12)),
        *((65, 19.87), (129, 21.62), (257, 24.17)),
    ),
)
# DeepSeek-V2-Lite, worked out from the LRU hit rates in MoE-SpeQ's Table 3. One more token misses K
# times the miss rate of LRU with as many slots as there are distinct experts so far.
PUBLISHED = RouteCurve(
    "DeepSeek-V2-Lite (LRU in MoE-SpeQ, Table 3)",
    64,
    6,
    ((1, 6), (2, 10.25), (3, 13.94), (5, 19.98), (9, 28.76), (17, 39.06), (33, 47.76)),
)
# Qwen3-30B-A3B, worked out in the same way from the hits that were reported of caches with 5, 15,
# 30 and 50% of the experts: 37, 74, 89 and 96%. Between these the logarithm of misses is straight.
MANY_EXPERTS = RouteCurve(
    "Qwen3-30B-A3B (caches, imp #1374)",
    128,
    8,
    (
        *((1, 8), (2, 12.51), (3, 15.82), (5, 20.64), (9, 27.55), (17, 37.0), (33, 48.85)),
        *((65, 62.9), (129, 77.87), (257, 92.72)),
    ),
)
CURVES: dict[str, RouteCurve | None] = {
    "published": PUBLISHED,
    "bundled": BUNDLED,
    "independent": None,
}


def nearest_curve(num_experts: int) -> RouteCurve:
    """The curve of the model whose layers have most nearly as many experts.

    Tokens share the more of them, the fewer there are.
    """
    known = (BUNDLED, PUBLISHED, MANY_EXPERTS)
    return min(known, key=lambda c: abs(math.log(c.num_experts / num_experts)))


@dataclass(frozen=True, slots=True)
class Locality:
    """A layer's routes: as recorded, perhaps with another model.

    Without a curve routes are independent, which is MoESD's N(t) and the worst case. A curve is
    carried over to other numbers of experts by the independent tokens that it stands for.
    """

    num_experts: int
    top_k: float
    curve: RouteCurve | None = PUBLISHED

    def without(self, held: int, covers: float) -> "Locality":
        """The routes to a layer's other experts, where so many are elsewhere.

        covers  share of what tokens choose that is of these
        """
        if not held:
            return self
        left = self.num_experts - held
        return replace(self, num_experts=left, top_k=min(self.top_k * (1 - covers) or RARELY, left))

    @property
    def source(self) -> str:
        if self.curve is None:
            return "independent routes, N(t) of MoESD"
        return f"routes of {self.curve.source}"

    def distinct(self, tokens: float) -> float:
        """D(t): the distinct experts of a layer that `tokens` consecutive tokens ask for."""
        if self.curve is not None:
            tokens = self.curve.independent_tokens(tokens)
        return activated_experts(self.num_experts, self.top_k, tokens)

    def misses(self, slots: float, tokens: float) -> float:
        """The experts that a layer with `slots` slots misses in a pass over `tokens` tokens."""
        if slots >= self.num_experts:
            return 0.0
        if self.top_k == self.num_experts:
            return self.num_experts - slots
        free, stays = 1 - slots / self.num_experts, 1 - self.top_k / self.num_experts
        held = math.log(free) / math.log(stays)
        if self.curve is not None:
            held = self.curve.tokens(held)
        return self.distinct(held + tokens) - slots
