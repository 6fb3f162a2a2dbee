"""A pass of one token over the experts that draft: launched kernel by kernel, or recorded."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Cut
from speq.layers.draft_experts import DraftBank
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.recorded import RecordedPasses
from speq.models.texts import TextTokens
from speq.models.tree import Tree
from speq.routing import Route

# Told (layer, route).
OnLayer = Callable[[int, Route], None]


class DraftPass(Protocol):
    def run(self, token_id: int, on_route: OnLayer, tree: Tree | None = None) -> Tensor:
        """Write the token's entries behind the cache's length, which stays as it is.

        tree  whose last node the token is; None: it follows the entries of the cache

        Returns logits [1, V], which the next run may overwrite. on_route is told the route of every
        layer, whose tensors the next run may overwrite as well.
        """


def draft_pass_over(
    model: MoEModel, cache: KVCache, bank: DraftBank, graphs_on: Accelerator | None
) -> DraftPass:
    """graphs_on: the device that passes are recorded on; None: they are launched."""
    if graphs_on is None:
        return EagerPass(model, cache, bank)
    return RecordedPass(model, cache, bank, graphs_on)


class EagerPass:
    """Launches kernel by kernel; routes are told as soon as their router has spoken."""

    def __init__(self, model: MoEModel, cache: KVCache, bank: DraftBank) -> None:
        self._model, self._cache, self._bank = model, cache, bank

    def run(self, token_id: int, on_route: OnLayer, tree: Tree | None = None) -> Tensor:
        self._bank.on_route = on_route
        try:
            return self._model.score(self._bank, self._cache, [token_id], tree).logits
        finally:
            self._bank.on_route = None


def run_together(
    model: MoEModel, bank: DraftBank, texts: list[TextTokens], on_route: OnLayer
) -> Tensor:
    """A token of each of several texts in one pass, launched kernel by kernel; logits [B, V].

    on_route  told the route of every layer, a row for each of the texts
    """
    bank.on_route = on_route
    try:
        hidden = model.forward_texts(bank, texts)[0]
        return model.logits(hidden, bank)
    finally:
        bank.on_route = None


class RecordedPass:
    """Launches a graph; routes are told when that is done. A token that does not follow the cache's
    entries is launched kernel by kernel.
    """

    def __init__(
        self, model: MoEModel, cache: KVCache, bank: DraftBank, device: Accelerator
    ) -> None:
        self._eager = EagerPass(model, cache, bank)
        self.passes = RecordedPasses("drafts", device, cache, DraftOutput(model, cache, bank))

    def run(self, token_id: int, on_route: OnLayer, tree: Tree | None = None) -> Tensor:
        follows = tree is None or tree.is_chain
        results = self.passes.run([token_id]) if follows else None
        if results is None:
            return self._eager.run(token_id, on_route, tree)
        logits, topk_ids, topk_weights = results
        rows = zip(topk_ids.split(1), topk_weights.split(1), strict=True)
        for layer, (ids, weights) in enumerate(rows):
            on_route(layer, Route(ids, weights))
        return logits


class DraftOutput:
    """Computes logits [1, V] and the routes of all MoE layers: ids and weights [L, K]."""

    def __init__(self, model: MoEModel, cache: KVCache, bank: DraftBank) -> None:
        self._model, self._cache, self._bank = model, cache, bank

    def __call__(
        self, token_ids: Tensor, positions: Tensor, seen: int, cut: Cut
    ) -> tuple[Tensor, Tensor, Tensor]:
        routes: list[Route] = []
        self._bank.on_route = lambda layer, route: routes.append(route)
        try:
            hidden = self._model.forward_at(self._bank, self._cache, token_ids, positions, seen)
        finally:
            self._bank.on_route = None
        ids = torch.cat([route.topk_ids for route in routes])
        weights = torch.cat([route.topk_weights for route in routes])
        return self._model.logits(hidden[0], self._bank), ids, weights
