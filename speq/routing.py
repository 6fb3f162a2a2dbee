"""What a router decided for some tokens in one MoE layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """topk_ids [T, K] int64, topk_weights [T, K], router_logits [T, E] where they were seen."""

    topk_ids: Tensor
    topk_weights: Tensor
    router_logits: Tensor | None = None
