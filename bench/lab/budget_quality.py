"""How far a model within an expert budget is from the exact one, text by text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Quality:
    """Of texts that both models read, token by token.

    nats    of each text: mean over its tokens of -log p, within the budget
    added   of each text: that less the exact model's
    kl      of each text: mean KL divergence of the exact model's distribution from the budget's
    same    tokens at which the likeliest token is the same; tokens: of how many
    """

    nats: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: int = 0
    tokens: int = 0

    def add(self, token_ids: Sequence[int], exact: Tensor, budgeted: Tensor) -> None:
        """A text, and logits [T, V] of both models at its tokens: row t foretells token t + 1."""
        known, ours = (logits.float().log_softmax(-1) for logits in (exact, budgeted))
        following = list(token_ids[1:])
        rows = range(len(following))
        nats = float(-ours[rows, following].mean())
        self.nats.append(nats)
        self.added.append(nats + float(known[rows, following].mean()))
        self.kl.append(float((known.exp() * (known - ours)).sum(-1).mean()))
        self.same += int((known.argmax(-1) == ours.argmax(-1)).sum())
        self.tokens += len(known)

    def row(self) -> dict[str, Any]:
        """Means over texts, with their standard errors."""
        return {
            "nats": mean(self.nats),
            "nats_added": mean(self.added),
            "nats_added_error": standard_error(self.added),
            "kl": mean(self.kl),
            "kl_error": standard_error(self.kl),
            "same_token": self.same / self.tokens,
        }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of a single value."""
    if len(values) < 2:
        return None
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def rouge_l(reference: Sequence[int], other: Sequence[int]) -> float:
    """The F-measure of the longest common subsequence of two texts (Lin, 2004)."""
    if not reference or not other:
        return 0.0
    lengths = [0] * (len(other) + 1)
    for token in reference:
        above_left = 0
        for at, each in enumerate(other, start=1):
            above = lengths[at]
            lengths[at] = above_left + 1 if token == each else max(above, lengths[at - 1])
            above_left = above
    return 2 * lengths[-1] / (len(reference) + len(other))
