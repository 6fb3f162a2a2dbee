"""How routers choose experts of a row by its logits [E], among those that may be chosen."""

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def best(scores: np.ndarray, allowed: set[int], top_k: int) -> list[int]:
    """The experts of the largest scores, the first of equals."""
    return sorted(allowed, key=lambda expert: (-scores[expert], expert))[:top_k]


def in_groups(scores: np.ndarray, groups: int, kept: int, by: int) -> set[int]:
    """Experts of the best groups, neighbours in equal numbers: a group counts for the sum of its
    `by` best scores.
    """
    size = len(scores) // groups
    worth = [sum(sorted(scores[at * size : (at + 1) * size])[-by:]) for at in range(groups)]
    chosen = sorted(range(groups), key=lambda at: -worth[at])[:kept]
    return {expert for at in chosen for expert in range(at * size, (at + 1) * size)}


def by_scores(
    logits: np.ndarray,
    allowed: set[int],
    top_k: int,
    *,
    of: str = "softmax",
    divided: bool = False,
    scale: float = 1.0,
    bias: np.ndarray | None = None,
    added: float = 0.0,
    factors: np.ndarray | None = None,
) -> dict[int, float]:
    """Weights by expert: the best scores, chosen with a bias and weighed without it.

    added    to the sum that weights are divided by; factors: [E], of each expert
    """
    scores = softmax(logits) if of == "softmax" else sigmoid(logits)
    chosen = best(scores if bias is None else scores + bias, allowed, top_k)
    total = sum(scores[expert] for expert in chosen) + added if divided else 1.0
    each = np.ones(len(logits)) if factors is None else factors
    return {expert: scores[expert] / total * each[expert] * scale for expert in chosen}


def by_mixer(logits: np.ndarray, allowed: set[int], top_k: int, jitter: float) -> dict[int, float]:
    """SparseMixer (Phi-3.5-MoE): the best of those left, weighed by a softmax over those near it.

    Near is who is behind the best by 2 * jitter of the larger magnitude at most.
    """
    left, weights = set(allowed), {}
    for _ in range(top_k):
        (first,) = best(logits, left, 1)
        top = logits[first]
        near = {
            expert
            for expert in left
            if top - logits[expert] <= 2 * jitter * max(abs(logits[expert]), top)
        }
        weights[first] = float(1 / sum(np.exp(logits[expert] - top) for expert in near))
        left.remove(first)
    return weights
