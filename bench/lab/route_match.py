"""How far a draft's routes are the exact model's: MoE-SpeQ, Figures 5 and 6."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speq.routing import Route
from speq.stats import ratio


def rank_experts(route: Route) -> list[list[int]]:
    """Each token's experts, the most important first: [T][K].

    By the router's logits, or the weights where those were not seen; routers list their choice in
    orders of their own. Of equals the lower number comes first.
    """
    scores = route.topk_weights
    if route.router_logits is not None:
        scores = route.router_logits.gather(-1, route.topk_ids)
    rows = zip(route.ids, scores.tolist(), strict=True)
    return [
        [expert for _, expert in sorted(zip((-s for s in row), experts, strict=True))]
        for experts, row in rows
    ]


@dataclass(slots=True)
class RouteMatch:
    """Counts over (token, layer) pairs.

    hard            the same experts in the same order of importance
    soft            the same experts in another order
    mismatch        at least one expert is another
    named, choices  of the exact model's choices, those that the draft had named, and all
    """

    hard: int = 0
    soft: int = 0
    mismatch: int = 0
    named: int = 0
    choices: int = 0

    def add(self, drafted: list[int], used: list[int]) -> None:
        """Count one token in one layer, experts in order of importance."""
        common = set(drafted) & set(used)
        self.named += len(common)
        self.choices += len(used)
        if drafted == used:
            self.hard += 1
        elif len(common) == len(used):
            self.soft += 1
        else:
            self.mismatch += 1

    @property
    def pairs(self) -> int:
        return self.hard + self.soft + self.mismatch

    @property
    def recall(self) -> float | None:
        return ratio(self.named, self.choices)


def total(matches: Iterable[RouteMatch]) -> RouteMatch:
    whole = RouteMatch()
    for match in matches:
        for name in RouteMatch.__slots__:
            setattr(whole, name, getattr(whole, name) + getattr(match, name))
    return whole


def entropy_bits(counts: Sequence[int]) -> float:
    """Entropy of choices that fell on each expert so often, in bits; log2 E where all are equal."""
    choices = sum(counts)
    shares = [count / choices for count in counts if count]
    return sum(-share * math.log2(share) for share in shares)
