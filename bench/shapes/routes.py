"""Routes as a random checkpoint's routers make them, and what caches of any size make of those."""

from collections import OrderedDict
from math import inf, sqrt

import torch

from speq.bench.shapes.random_checkpoint import SKEW

# Experts that lay in slots when needed, by the share of a layer's experts that are resident: LRU
# with DeepSeek-V2-Lite, of MoE-SpeQ's Table 3.
PUBLISHED_HITS = {0.05: 0.37, 0.15: 0.74, 0.30: 0.89, 0.50: 0.96}
TOKENS, WARM_UP = 400, 100

# Experts that each token chooses, in a layer.
Routes = list[list[int]]


def routes_of(num_experts: int, top_k: int, seed: int = 0) -> Routes:
    """Routes of a layer for `TOKENS` tokens, by the distribution of its logits."""
    draws = torch.Generator().manual_seed(seed)
    # Half of a normed input is the shared direction, by which experts differ for good.
    lasting = torch.randn(num_experts, generator=draws) * sqrt(1 + SKEW**2)
    logits = lasting + torch.randn(TOKENS, num_experts, generator=draws)
    chosen: Routes = logits.topk(top_k, dim=1).indices.tolist()
    return chosen


def lru_hits(routes: Routes, slots: int) -> float:
    """Share of choices whose expert LRU kept, once the slots are warm."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = choices = 0
    for at, chosen in enumerate(routes):
        for expert in chosen:
            if at >= WARM_UP:
                choices += 1
                hits += expert in cached
            if expert in cached:
                cached.move_to_end(expert)
                continue
            if len(cached) >= slots:
                cached.popitem(last=False)
            cached[expert] = None
    return hits / choices


def clairvoyant_misses(routes: Routes, slots: int) -> float:
    """Misses of a token in a layer whose cache drops what is needed last (Belady, 1966)."""
    later: list[dict[int, float]] = [{} for _ in routes]
    next_use: dict[int, float] = {}
    for at in range(len(routes) - 1, -1, -1):
        later[at] = {expert: next_use.get(expert, inf) for expert in routes[at]}
        next_use |= dict.fromkeys(routes[at], float(at))
    cached: dict[int, float] = {}
    misses = 0
    for at, chosen in enumerate(routes):
        misses += sum(expert not in cached for expert in chosen) if at >= WARM_UP else 0
        cached |= later[at]
        while len(cached) > slots:
            del cached[max(cached, key=lambda expert: cached[expert])]
    return misses / (len(routes) - WARM_UP)
