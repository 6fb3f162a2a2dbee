"""From logits [V] to a token: penalties, temperature, top-k, top-p, min-p, in this order."""

from collections.abc import Sequence

import numpy as np


def penalised(
    logits: np.ndarray,
    prompt: Sequence[int],
    generated: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    """Less likely where tokens came before. Repetition (CTRL) counts the prompt as well, presence
    and frequency (OpenAI) what was generated.
    """
    scores = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        scores[token] *= 1 / repetition if scores[token] > 0 else repetition
    for token in set(generated):
        scores[token] -= presence + frequency * list(generated).count(token)
    return scores


def distribution(
    logits: np.ndarray,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities: top_k 0 keeps all, and what equals the last that is kept is kept too."""
    scores = logits.astype(np.float64) / temperature
    probs = np.exp(scores - scores.max())
    if top_k:
        probs[scores < np.sort(scores)[-min(top_k, len(scores))]] = 0
    probs /= probs.sum()
    if top_p < 1:
        probs[mass_before(probs) >= top_p] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def mass_before(probs: np.ndarray) -> np.ndarray:
    """Of each token, what all likelier ones make up together."""
    order = np.argsort(-probs, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(probs[order])])
    first = np.searchsorted(-probs[order], -probs, side="left")
    return sums[first]


def drawn(probs: np.ndarray, times: np.ndarray) -> int:
    """Whose clock strikes first: each ticks at the rate of its probability, and `times` [V] are
    those of a rate of 1.
    """
    with np.errstate(divide="ignore"):
        return int(np.argmin(np.where(probs > 0, times / probs, np.inf)))
