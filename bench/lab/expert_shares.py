"""Figures of routes: distinct experts, what few experts cover, and which are chosen together.

Routes are arrays over L layers, T tokens (or nodes of a tree), K chosen experts and E experts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def windows(tokens: int, window: int) -> Iterator[slice]:
    """Stretches of `window` tokens that do not overlap; what is left at the end is left out."""
    return (slice(at, at + window) for at in range(0, tokens - window + 1, window))


def choices_of(ids: Ids, num_experts: int) -> Flags:
    """Whether each token chose each expert: [L, T, E] of ids [L, T, K]."""
    marks = np.zeros((*ids.shape[:2], num_experts), bool)
    np.put_along_axis(marks, ids, True, axis=2)
    return marks


def served_shares(ids: Ids, weights: Floats, num_experts: int) -> Floats:
    """The weight that each token gave each expert, 0 where it chose others: [L, T, E]."""
    spread = np.zeros((*ids.shape[:2], num_experts))
    np.put_along_axis(spread, ids, weights, axis=2)
    return spread


def distinct(marks: Flags) -> Ids:
    """Experts of each layer that any of the tokens chose, the union of Eq. 3: [L] of [L, T, E]."""
    return np.count_nonzero(marks.any(1), axis=1)


def ranking(scores: Floats) -> Ids:
    """Experts of each layer by score [L, E], the highest first; of equals the lower number."""
    return np.argsort(-scores, axis=1, kind="stable")


def covered_shares(scores: Floats, weights: Floats, sizes: Sequence[int]) -> Floats:
    """The share of a window's weight that its B best experts hold: [L, len(sizes)].

    scores   [L, E] that experts are ranked by: the sums of Eq. 5
    weights  [L, E] whose share is told
    sizes    numbers B of experts
    """
    held = np.cumsum(np.take_along_axis(weights, ranking(scores), axis=1), axis=1)
    return held[:, [size - 1 for size in sizes]] / held[:, -1:]


def coactivation(marks: Flags) -> Ids:
    """How many tokens chose both experts of each pair: [L, E, E] of [L, T, E]. The diagonal has
    the tokens that chose the expert (Eq. 4).
    """
    numbers = marks.astype(np.int64)
    return np.matmul(numbers.transpose(0, 2, 1), numbers)


def expected_pair(tokens: int, top_k: int, num_experts: int) -> float:
    """Tokens that choose both experts of a pair, if all are as likely: T K (K-1) / (E (E-1))."""
    return tokens * top_k * (top_k - 1) / (num_experts * (num_experts - 1))


def strongest_pair(together: Ids) -> tuple[int, int]:
    """The two experts of a layer [E, E] that are chosen together most often, the lower first."""
    above = np.triu(together, k=1)
    first, second = divmod(int(above.argmax()), above.shape[1])
    return first, max(second, first + 1)
