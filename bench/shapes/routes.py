"""Routes as skewed as published ones: routers that make them, and figures of them.

An expert's logit is a bias and a part that changes from token to token, normally distributed; the
bias gives the probability that the expert is among those chosen. A router has no bias of its own
in most families, so it is the weight of a hidden unit that is the same for all tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

# (share of a layer's experts, share of what tokens choose): hits that were reported of caches.
SOURCE = "Qwen3-30B-A3B, imp #1374"
CURVE = ((0.0, 0.0), (0.05, 0.37), (0.15, 0.74), (0.30, 0.89), (0.50, 0.96), (1.0, 1.0))
# No expert is chosen by all tokens, nor by none.
LEAST, MOST = 1e-4, 0.98
# Of the routes that a cache is tried on, so many fill it.
WARM_UP = 1 / 3

# Experts that tokens choose in a layer, by token.
Routes = list[list[int]]


def hits_of(share: float) -> float:
    """Share of requests for the most used experts, by the curve, straight between its points."""
    for (left, low), (right, high) in pairwise(CURVE):
        if share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return 1.0


def popularity(num_experts: int, top_k: int) -> Tensor:
    """Probability of each expert to be among a token's, the most used first."""
    hits = [hits_of(rank / num_experts) for rank in range(num_experts + 1)]
    shares = torch.tensor([high - low for low, high in pairwise(hits)])
    return (shares * top_k).clamp(LEAST, MOST)


def biases(num_experts: int, top_k: int) -> Tensor:
    """Biases [E] of logits that vary by 1, the most used expert first."""
    normal = NormalDist()
    return torch.tensor([normal.inv_cdf(p) for p in popularity(num_experts, top_k).tolist()])


def drawn_routes(num_experts: int, top_k: int, tokens: int, seed: int = 0) -> Routes:
    """Routes of a layer by the law of its router."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, num_experts, generator=generator) + biases(num_experts, top_k)
    chosen: Routes = logits.topk(top_k).indices.tolist()
    return chosen


def most_used_hits(layers: Sequence[Routes], num_experts: int, share: float) -> float:
    """Share of requests for the most used experts of each layer; of the last one, a part."""
    hits = wanted = 0.0
    room = share * num_experts
    for routes in layers:
        chosen = torch.tensor(routes).flatten()
        counts = sorted(torch.bincount(chosen, minlength=num_experts).tolist(), reverse=True)
        held = int(room)
        hits += sum(counts[:held]) + (room - held) * (counts[held] if held < num_experts else 0)
        wanted += len(chosen)
    return hits / wanted


def lru_hits(layers: Sequence[Routes], slots: int) -> float:
    """Share of requests that a least-recently-used cache of so many slots a layer has."""
    hits = wanted = 0
    for routes in layers:
        held: dict[int, None] = {}
        for token, chosen in enumerate(routes):
            counted = token >= WARM_UP * len(routes)
            wanted += counted * len(chosen)
            hits += counted * sum(expert in held for expert in chosen)
            for expert in chosen:
                held.pop(expert, None)
                held[expert] = None
            while len(held) > slots:
                del held[next(iter(held))]
    return hits / wanted


def clairvoyant_misses(routes: Routes, slots: int) -> float:
    """Experts of a layer that a token misses where what is needed last is evicted (Belady).

    The cache begins with those that are needed first, as one that has been in use.
    """
    uses: dict[int, list[int]] = {}
    for token in range(len(routes) - 1, -1, -1):
        for expert in routes[token]:
            uses.setdefault(expert, []).append(token)
    held = set(sorted(uses, key=lambda expert: uses[expert][-1])[:slots])
    missed = counted = 0
    for token, chosen in enumerate(routes):
        if token >= WARM_UP * len(routes):
            counted += 1
            missed += len(set(chosen) - held)
        held |= set(chosen)
        for expert in chosen:
            uses[expert].pop()
        by_next_use = sorted(held, key=lambda expert: (uses[expert] or [len(routes)])[-1])
        held = set(by_next_use[:slots])
    return missed / counted
