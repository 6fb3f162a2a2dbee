"""How long one layer of a model takes beside its experts, before any weight of it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speq.devices.device import Processor
from speq.layers.indexer import uses_earlier_choice
from speq.models.family import Family
from speq.models.moe_model import MoEModel
from speq.models.ngram_layer import tables_in
from speq.models.opened import Opened
from speq.models.packed_batch import SequenceTokens
from speq.models.shape import hf_config, skeleton
from speq.routing import Route
from speq.units import Clock

# Passes that are timed of each kind, behind one that is not.
PASSES = 7
# Layers of a deep pass, and rows of a wide one. A shallow one has a layer, a narrow one a row.
DEEP, WIDE = 4, 8


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds on the CPU of passes whose experts take no time and whose weights lie in caches.

    base_s  of a pass without layers
    layer_s, row_s  of each layer, and of each further row in a layer
    """

    base_s: float
    layer_s: float
    row_s: float

    @classmethod
    def of(cls, opened: Opened, dtype: torch.dtype, clock: Clock) -> "PassTimes":
        """Run passes of a model made of one layer, with weights of zeros."""
        model = skeleton(opened.family, hf_config(opened.checkpoint), opened.checkpoint.path)
        layer = only_layer(model, opened.family, dtype)
        body = model.eval().model
        shape = opened.shape
        cache = shape.cache(2 * WIDE, dtype, torch.device("cpu"))

        def timed(layers: int, rows: int) -> float:
            body.layers = nn.ModuleList([layer] * layers)  # type: ignore[union-attr]
            switched = MoEModel(model, opened.family, Processor(), {})  # which knows its layers
            batch = [SequenceTokens(cache, [0] * rows)]
            return passes_s(partial(switched.forward, NoExperts(), batch), clock)

        deep = min(DEEP, shape.num_layers)  # transformers runs no more
        shallow_s, deep_s, wide_s = timed(1, 1), timed(deep, 1), timed(deep, WIDE)
        layer_s = max(deep_s - shallow_s, 0.0) / (deep - 1) if deep > 1 else shallow_s
        row_s = max(wide_s - deep_s, 0.0) / (deep * (WIDE - 1))
        return cls(max(shallow_s - layer_s, 0.0), layer_s, row_s)


def only_layer(model: nn.Module, family: Family, dtype: torch.dtype) -> nn.Module:
    """Leave a model without storage one layer, the first that has experts and needs no other, and
    memory for it.
    """
    body: nn.Module = model.model  # type: ignore[assignment]
    layers: Any = body.layers
    at = next(
        each
        for each in family.moe_blocks(model)
        if not uses_earlier_choice(layers[each]) and not tables_in(layers[each])
    )
    layer: nn.Module = layers[at]
    body.layers = nn.ModuleList([layer])
    kinds = getattr(model.config, "layer_types", None)
    if kinds:  # so that each that stands for another is given what this one takes
        model.config.layer_types = [kinds[at]] * len(kinds)  # type: ignore[union-attr]
    width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    model.set_input_embeddings(nn.Embedding(1, width, device="meta"))  # type: ignore[operator]
    body.to(dtype).to_empty(device="cpu")
    for tensor in (*body.parameters(), *body.buffers()):
        tensor.data.zero_()
    return layer


def layer_bytes(opened: Opened, dtype: torch.dtype) -> int:
    """Upper bound of the memory that the layer takes."""
    shape = opened.shape
    rows, columns = shape.embedding
    inner = shape.resident_bytes(dtype) - rows * columns * dtype.itemsize
    return 2 * inner // shape.num_layers


class NoExperts:
    """A bank whose experts take no time."""

    drafts = False

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        return torch.zeros_like(hidden_states)


@torch.inference_mode()
def passes_s(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of the shortest of some calls, the first one apart: whatever else runs meanwhile only
    adds to them, and few calls may all be disturbed.
    """
    run()
    spent_s = []
    for _ in range(PASSES):
        start_s = clock()
        run()
        spent_s.append(clock() - start_s)
    return max(min(spent_s), 1e-9)
