"""A pass of one token over the INT4 experts: launched piece by piece, or recorded as a graph.

Launching a pass takes the host longer than the pass takes a GPU: a thousand kernels and more. A
graph is launched at once. It is recorded with the shapes and addresses that it runs with ever
after, so a recorded pass reads its token and position from the device and runs attention over a
fixed number of entries, the same for all positions of a bucket.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Graph, Processor
from speq.devices.staged import Uploads
from speq.layers.draft_experts import DraftExperts
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.routing import Route

logger = logging.getLogger("speq")

# Contexts that one graph serves. Attention of a pass runs over up to so many entries in vain, and a
# text that grows by so many tokens costs another recording, of about three passes.
BUCKET = 256
# Graphs kept: those used last. Their passes share one piece of memory, so that a further one costs
# no more than its nodes.
MAX_GRAPHS = 4

# Told (layer, route).
OnLayer = Callable[[int, Route], None]


class DraftPass(Protocol):
    def run(self, token_id: int, on_route: OnLayer) -> Tensor:
        """Write the token's entries behind the cache's length, which stays as it is.

        Returns logits [1, V], which the next run may overwrite. on_route is told the route of every
        layer, whose tensors the next run may overwrite as well.
        """


class EagerPass:
    """Launches kernel by kernel; routes are told as soon as their router has spoken."""

    def __init__(self, model: MoEModel, cache: KVCache, bank: DraftExperts) -> None:
        self._model, self._cache, self._bank = model, cache, bank

    def run(self, token_id: int, on_route: OnLayer) -> Tensor:
        self._bank.begin(0, lambda token, layer, route: on_route(layer, route))
        try:
            return self._model.score(self._bank, self._cache, [token_id]).logits
        finally:
            self._bank.begin(0, None)


class RecordedPass:
    """The pass as a graph for each bucket of contexts, recorded when it is first wanted.

    Routes are told when the graph is launched. Where no graph can be recorded, passes are launched
    kernel by kernel from then on, and a warning says why.

    logits        [1, V] of the last run
    topk_ids      [L, K] int64, and topk_weights [L, K]: its routes, by MoE layer
    """

    def __init__(
        self, model: MoEModel, cache: KVCache, bank: DraftExperts, device: Accelerator
    ) -> None:
        self._eager = EagerPass(model, cache, bank)
        self._model, self._cache, self._bank = model, cache, bank
        self._device: Accelerator | None = device
        self._uploads = Uploads(device)
        # The token and its position.
        self._inputs = torch.zeros(2, dtype=torch.int64, device=device.torch)
        self._graphs: dict[int, Graph] = {}
        # Made by the first pass, which knows their shapes.
        self._outputs: tuple[Tensor, ...] = ()

    @property
    def logits(self) -> Tensor:
        return self._outputs[0]

    @property
    def topk_ids(self) -> Tensor:
        return self._outputs[1]

    @property
    def topk_weights(self) -> Tensor:
        return self._outputs[2]

    @property
    def buckets(self) -> list[int]:
        """Entries that the graphs kept run over, the one used last behind the others."""
        return list(self._graphs)

    def run(self, token_id: int, on_route: OnLayer) -> Tensor:
        length = self._cache.lengths[0]
        self._uploads.write(torch.tensor([token_id, length]), self._inputs)
        graph = self._graph_over(min(-(-(length + 1) // BUCKET) * BUCKET, self._cache.capacity))
        if graph is None:
            return self._eager.run(token_id, on_route)
        graph.replay()
        rows = zip(self.topk_ids.split(1), self.topk_weights.split(1), strict=True)
        for layer, (ids, weights) in enumerate(rows):
            on_route(layer, Route(ids, weights))
        return self.logits

    def _graph_over(self, seen: int) -> Graph | None:
        """The graph over so many entries, from now on the one used last."""
        graph = self._graphs.pop(seen, None) or self._record(seen)
        if graph is not None:
            self._graphs[seen] = graph
        return graph

    def _record(self, seen: int) -> Graph | None:
        if self._device is None:
            return None
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        beside = next(iter(self._graphs.values()), None)
        try:
            if not self._outputs:
                self._outputs = tuple(torch.empty_like(made) for made in self._compute(seen))
            return self._device.capture(partial(self._fill, seen), beside)
        except RuntimeError as error:  # torch's for all that CUDA refuses
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("drafts run without graphs, which could not be recorded: %s", reason)
            self._device = None
            self._graphs.clear()
            return None

    @torch.inference_mode()
    def _fill(self, seen: int) -> None:
        for output, made in zip(self._outputs, self._compute(seen), strict=True):
            output.copy_(made)

    @torch.inference_mode()
    def _compute(self, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        routes: list[Route] = []
        token_id, position = self._inputs.view(2, 1, 1).unbind()
        self._bank.begin(0, lambda token, layer, route: routes.append(route))
        try:
            hidden = self._model.forward_at(self._bank, self._cache, token_id, position, seen)
        finally:
            self._bank.begin(0, None)
        ids = torch.cat([route.topk_ids for route in routes])
        weights = torch.cat([route.topk_weights for route in routes])
        return self._model.logits(hidden[0]), ids, weights


def recording_device(
    graphs: str, device: Processor | Accelerator, model: MoEModel
) -> Accelerator | None:
    """The device whose graphs a model's drafts run as, if any; a log line says why none do.

    graphs  the option
    """
    if graphs == "none" or isinstance(device, Processor):
        return None
    if model.unrecordable is not None:
        logger.warning("drafts run without graphs: %s", model.unrecordable)
        return None
    return device
