"""What decoder layers do between their products, and the gated delta rule."""

import numpy as np


def rms_norm(row: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * row / np.sqrt((row * row).mean() + eps)


def turned(head: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One head [D] by its position: the first R columns are R / 2 pairs, a half apart."""
    out, half = head.copy(), len(cos) // 2
    for at in range(half):
        first, second = head[at], head[half + at]
        out[at] = first * cos[at] - second * sin[at]
        out[half + at] = second * cos[half + at] + first * sin[half + at]
    return out


def attended(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    sink: float | None = None,
) -> np.ndarray:
    """One head's query [D] over the entries [N, D] that it sees, and a score of no entry."""
    scores = [scale * float(query @ key) for key in keys]
    beside = [] if sink is None else [sink]
    largest = max(scores + beside)
    weights = [np.exp(score - largest) for score in scores]
    total = sum(weights) + sum(np.exp(score - largest) for score in beside)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes of a tree from its root down to one; parents[root] is -1."""
    return [node] if parents[node] < 0 else [*path_to(parents[node], parents), node]


def seen_by(node: int, parents: list[int], before: int, window: int | None) -> list[int]:
    """Entries that a node sees, of `before` ones and those of the tree's nodes behind them: the
    last `window` of its path.
    """
    path = [*range(before), *(before + each for each in path_to(node, parents))]
    return path if window is None else path[-window:]


def delta_step(
    state: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    strength: float,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """One token and one head (arXiv:2412.06464, Eq. 10): the state [D, V] behind it, and what it
    gives [V]. Keys and queries have length 1, and queries are divided by the root of their width.
    The decay is one number, or one of each row of the state (arXiv:2510.26692, Eq. 1).
    """
    key = key / np.sqrt(key @ key + eps)
    query = query / np.sqrt(query @ query + eps) / np.sqrt(len(query))
    width = len(key)
    forgetting = (np.eye(width) - strength * np.outer(key, key)) * np.exp(decay)
    state = forgetting @ state + strength * np.outer(key, value)
    return state, query @ state


def routed(
    logits: np.ndarray,
    top_k: int,
    *,
    sigmoid: bool = False,
    divided: bool = False,
    scale: float = 1.0,
    bias: np.ndarray | None = None,
    added: float = 0.0,
    factors: np.ndarray | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 1,
) -> dict[int, float]:
    """Weights of the experts that a router chooses by one token's logits, best first."""
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
    ranks = scores + (0 if bias is None else bias)
    parts = ranks.reshape(groups, -1)
    sums = np.sort(parts, axis=1)[:, -group_best:].sum(axis=1)
    kept = set(np.argsort(-sums)[:kept_groups])
    size = parts.shape[1]
    among = [expert for expert in range(len(logits)) if expert // size in kept]
    chosen = sorted(among, key=lambda expert: -ranks[expert])[:top_k]
    total = sum(scores[expert] for expert in chosen) + added if divided else 1
    each = np.ones(len(logits)) if factors is None else factors
    return {expert: scores[expert] / total * scale * each[expert] for expert in chosen}
