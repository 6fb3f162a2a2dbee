"""Routes: a router's choices for some tokens in one MoE layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speq.errors import present

# Returns logits [rows, E] of the next MoE layer's router for some of the rows.
NextRouter = Callable[[list[int]], Tensor]


@dataclass(frozen=True, slots=True)
class RoutePrediction:
    """Experts of the next MoE layer, predicted by its router from this layer's hidden states.

    ids      [rows][K], the likeliest first
    margins  [rows][K]: logit of each minus the largest logit outside the top K
    """

    ids: list[list[int]]
    margins: list[list[float]]


@dataclass(slots=True)
class Route:
    """topk_ids [T, K] int64, topk_weights [T, K], and router_logits [T, E] if they were kept.

    active_rows  rows whose experts are requested, ascending; None: all. The others are pruned
    left_out     experts that are never requested
    next_router  applies the next MoE layer's router to the inputs of this layer's experts. Hidden
                 states change little from layer to layer. None in the last layer
    margins      of a predicted route, [T][K], as `RoutePrediction.margins`; None: a router chose it

    The tensors are the router's own, on the model's device. They are copied to the host once, on
    first use, or together by `speq.layers.route_reader`.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    router_logits: Tensor | None = None
    next_router: NextRouter | None = None
    active_rows: tuple[int, ...] | None = None
    left_out: frozenset[int] = frozenset()
    margins: list[list[float]] | None = None
    _host_ids: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _host_weights: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _ids: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)
    _prediction: RoutePrediction | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def from_router(self) -> bool:
        """True if a router chose it, of the exact model or of its quantized draft."""
        return self.margins is None

    @property
    def logits(self) -> Tensor:
        """The router_logits of a pass that kept them."""
        return present(self.router_logits, "a route without router logits cannot be chosen again")

    @property
    def host_ids(self) -> Tensor:
        """topk_ids in host memory."""
        if self._host_ids is None:
            self._host_ids = self.topk_ids.cpu()
        return self._host_ids

    @property
    def ids(self) -> list[list[int]]:
        """topk_ids, row by row."""
        if self._ids is None:
            self._ids = self.host_ids.tolist()
        return self._ids

    @property
    def host_weights(self) -> Tensor:
        """topk_weights in host memory."""
        if self._host_weights is None:
            self._host_weights = self.topk_weights.cpu()
        return self._host_weights

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """topk_ids and topk_weights of active rows."""
        ids, weights = self.host_ids.numpy(), self.host_weights.float().numpy()
        return (
            (ids, weights)
            if self.active_rows is None
            else (ids[[*self.active_rows]], weights[[*self.active_rows]])
        )

    @property
    def weights(self) -> list[list[float]]:
        """topk_weights, row by row."""
        weights: list[list[float]] = self.host_weights.tolist()
        return weights

    @property
    def experts(self) -> list[int]:
        """Distinct experts of all rows, active or not, ascending."""
        return sorted({expert for row in self.ids for expert in row})

    @property
    def rows(self) -> Sequence[int]:
        """Active rows, ascending."""
        return range(len(self.topk_ids)) if self.active_rows is None else self.active_rows

    def split(self) -> list["Route"]:
        """Make a route for each row."""
        rows = zip(self.topk_ids.split(1), self.topk_weights.split(1), self.ids, strict=True)
        made = []
        for topk_ids, topk_weights, ids in rows:
            route = Route(topk_ids, topk_weights)
            route._ids = [ids]
            made.append(route)
        return made

    def instead(self, topk_ids: Tensor, topk_weights: Tensor) -> "Route":
        """Make a route of the same rows with other experts, [T, K] in host memory."""
        device, dtype = self.topk_ids.device, self.topk_weights.dtype
        weights = topk_weights.to(dtype)
        route = Route(
            topk_ids.to(device),
            weights.to(device),
            self.router_logits,
            self.next_router,
            self.active_rows,
        )
        route.was_read(topk_ids, weights, self._prediction)
        return route

    def predict_next_layer(self, rows: list[int]) -> RoutePrediction | None:
        """Predict these rows' experts in the next layer; None in the last layer."""
        if self._prediction is not None:
            prediction = self._prediction
            return RoutePrediction(
                [prediction.ids[row] for row in rows], [prediction.margins[row] for row in rows]
            )
        if self.next_router is None:
            return None
        ids, margins = top_experts(self.next_router(rows), self.topk_ids.shape[1])
        return RoutePrediction(ids.tolist(), margins.tolist())

    def was_read(
        self, host_ids: Tensor, host_weights: Tensor, prediction: RoutePrediction | None
    ) -> None:
        """Keep host copies of topk_ids and topk_weights, and the prediction for every row."""
        self._host_ids, self._host_weights, self._prediction = host_ids, host_weights, prediction


def top_experts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Find the `top_k` largest of logits [T, E]: ids [T, K] int64, float32 margins [T, K].

    A margin is over the largest logit outside the top K.
    """
    values, ids = torch.topk(logits.float(), min(top_k + 1, logits.shape[1]))
    return ids[:, :top_k], values[:, :top_k] - values[:, -1:]
