"""What a router decided for some tokens in one MoE layer."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """topk_ids [T, K] int64, topk_weights [T, K], router_logits [T, E] where they were seen.

    following  what the next MoE layer's router says of some of the rows, as they are when they
               enter this layer's experts: [rows, E]. Hidden states change little from layer to
               layer. None in the last layer.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    router_logits: Tensor | None = None
    following: Callable[[list[int]], Tensor] | None = None
