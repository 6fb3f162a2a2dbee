"""A pass of one token over the INT4 experts."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from speq.layers.draft_experts import DraftExperts
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.routing import Route

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
        self._bank.on_route = on_route
        try:
            return self._model.score(self._bank, self._cache, [token_id]).logits
        finally:
            self._bank.on_route = None
