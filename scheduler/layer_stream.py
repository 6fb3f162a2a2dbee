"""Streams a prompt's experts through slots in prefill: each is loaded once for a chunk.

A chunk uses most experts of every layer, and a long one uses all. While a layer computes, its
missing experts are loaded, and then the next layer's likely ones. After the last layer comes the
first one, for the next chunk.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import ClassVar

from speq.routing import Route
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.route_history import RouteHistory
from speq.units import Done

# During prefill, one slot in this many belongs to no layer. The next layer's experts wait there;
# the other slots keep experts that the next chunk will use again.
SPARE_SHARE = 4
# Tokens of a long chunk, at least. Reads cannot hide behind the computation of a shorter one.
LONG_CHUNK = 128
# Experts computed at a time. Their slots are free afterwards.
WAVE = 4


class LayerStream:
    """Serves the layers of prefill.

    on_route  called with each layer's exact route; None: nothing to call
    """

    predicts_next_layer: ClassVar[bool] = False

    def __init__(self, loader: ExpertLoader, history: RouteHistory, num_layers: int) -> None:
        self._loader = loader
        self.history = history
        self._num_layers = num_layers
        self._num_experts = num_layers * history.num_experts
        self._tokens = self._chunk = self._done = self._rows = 0
        self._progress: Done | None = None
        self.on_route: Callable[[int, Route], None] | None = None

    @contextmanager
    def prompt(self, tokens: int, chunk: int, progress: Done | None) -> Iterator[None]:
        """Prepare for a prompt of `tokens` tokens, which the block runs in chunks.

        progress  called with (tokens done, tokens)
        """
        self._tokens, self._chunk, self._progress = tokens, chunk, progress
        self._done = self._rows = 0
        cache = self._loader.cache
        self._loader.runs_rows(min(tokens, chunk))
        try:
            if min(tokens, chunk) >= LONG_CHUNK:
                others = max(self._num_experts - cache.num_slots, 0)
                cache.reserve(min(cache.num_slots // SPARE_SHARE, others))
            yield
        finally:
            cache.reserve(0)
            self._loader.runs_rows(1)
            self._progress = None

    def observe(self, layer: int, route: Route) -> None:
        """Learn a layer's exact route, just before the layer is served."""
        self._rows = route.topk_ids.shape[0]
        self._loader.runs_rows(self._rows)
        self.history.observe(layer, route)
        policy = self._loader.cache.policy
        policy.observe(layer, *route.arrays)
        policy.expect(max(self._rows_after, 1))
        if self.on_route is not None:
            self.on_route(layer, route)
        if self._progress is not None:
            self._progress(self._done + self._rows * layer // self._num_layers, self._tokens)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once."""
        next_layer, rows = layer + 1, self._rows
        if next_layer == self._num_layers:
            next_layer, rows = 0, self._rows_after
            self._done += self._rows
        likely = self.history.likely(next_layer, rows, len(experts)) if rows else []
        self._loader.cache.policy.hint_next_use(next_layer, likely)
        wanted = [ExpertKey(next_layer, expert) for expert in likely]
        yield from self._loader.serve(layer, experts, lambda: self._load(wanted), WAVE)
        self._loader.cancel_prefetch(layer)

    @property
    def _rows_after(self) -> int:
        """Rows of the next chunk; 0: this one is the last."""
        return max(min(self._chunk, self._tokens - self._done - self._rows), 0)

    def _load(self, wanted: list[ExpertKey]) -> None:
        self._loader.load_ahead(wanted, len(wanted))
