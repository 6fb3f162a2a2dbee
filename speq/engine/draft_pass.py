"""Draft passes of one token: launched kernel by kernel, or replayed from a graph."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Cut
from speq.layers.draft_experts import DraftBackend
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.packed_batch import SequenceTokens
from speq.models.recorded import RecordedPasses
from speq.routing import Route

# Called with (layer, route).
OnLayer = Callable[[int, Route], None]


class DraftPass(Protocol):
    def run(self, batch: Sequence[SequenceTokens], on_layer: OnLayer) -> Tensor:
        """Run one token of each sequence; return logits [B, V], which the next run may overwrite.

        Its KV is written after the cache's length, which does not change.

        on_layer  called with every layer's route, a row for each sequence; the next run may
                  overwrite its tensors
        """


def draft_pass_over(
    model: MoEModel, cache: KVCache, backend: DraftBackend, graphs_on: Accelerator | None
) -> DraftPass:
    """Make a draft pass. graphs_on: device to record passes on; None: they are launched"""
    if graphs_on is None:
        return EagerPass(model, backend)
    return RecordedPass(model, cache, backend, graphs_on)


class EagerPass:
    """Launches kernel by kernel; reports a route as soon as the router has chosen."""

    def __init__(self, model: MoEModel, backend: DraftBackend) -> None:
        self._model, self._backend = model, backend

    def run(self, batch: Sequence[SequenceTokens], on_layer: OnLayer) -> Tensor:
        self._backend.on_route = on_layer
        try:
            hidden = self._model.forward(self._backend, batch)[0]
            return self._model.logits(hidden, self._backend)
        finally:
            self._backend.on_route = None


class RecordedPass:
    """Launches a graph, and reports routes when it has ended.

    Several sequences, and a token that does not follow the KV of the cache, are launched kernel by
    kernel.
    """

    def __init__(
        self, model: MoEModel, cache: KVCache, backend: DraftBackend, device: Accelerator
    ) -> None:
        self._eager, self._cache = EagerPass(model, backend), cache
        self.passes = RecordedPasses("drafts", device, cache, DraftOutput(model, cache, backend))

    def run(self, batch: Sequence[SequenceTokens], on_layer: OnLayer) -> Tensor:
        first = batch[0]
        results = None
        if len(batch) == 1 and first.cache is self._cache and first.is_chain:
            results = self.passes.run(first.token_ids)
        if results is None:
            return self._eager.run(batch, on_layer)
        logits, topk_ids, topk_weights = results
        rows = zip(topk_ids.split(1), topk_weights.split(1), strict=True)
        for layer, (ids, weights) in enumerate(rows):
            on_layer(layer, Route(ids, weights))
        return logits


class DraftOutput:
    """Computes logits [1, V] and the routes of all MoE layers: ids and weights [L, K]."""

    def __init__(self, model: MoEModel, cache: KVCache, backend: DraftBackend) -> None:
        self._model, self._cache, self._backend = model, cache, backend

    def __call__(
        self, token_ids: Tensor, positions: Tensor, seen: int, cut: Cut
    ) -> tuple[Tensor, Tensor, Tensor]:
        routes: list[Route] = []
        self._backend.on_route = lambda layer, route: routes.append(route)
        try:
            hidden = self._model.forward_at(self._backend, self._cache, token_ids, positions, seen)
        finally:
            self._backend.on_route = None
        ids = torch.cat([route.topk_ids for route in routes])
        weights = torch.cat([route.topk_weights for route in routes])
        return self._model.logits(hidden[0], self._backend), ids, weights
