"""A pipeline stage: some layers of a model; other machines hold the rest.

The first stage has the embedding, the last norm and the head as well. Its pass goes through its own
layers, then through the other machines' layers, and returns to the norm. So callers of the model
need not know of stages.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from speq.errors import present
from speq.layers.arguments import CACHE_NAMES, LAYER_ARGUMENTS, refuse_unknown
from speq.models.bounds import LAYER
from speq.models.family import Family
from speq.models.kv_cache import Change
from speq.models.packed_batch import BatchSpan

# Argument of gemma4's layers for KV that layers share; the supported models share none.
GEMMA4 = ("shared_kv_states",)
# Argument of glm_moe_dsa's layers for what the indexer of an earlier layer chose.
CHOSEN = "prev_topk_indices"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `last` (exclusive), by their numbers in the whole model."""

    first: int
    last: int

    @property
    def layers(self) -> range:
        return range(self.first, self.last)

    @property
    def has_ends(self) -> bool:
        """True if the embedding, the last norm and the head belong to it."""
        return self.first == 0

    def holds(self, name: str) -> bool:
        """True if a tensor of the checkpoint belongs to it."""
        layer = LAYER.search(name)
        return self.has_ends if layer is None else int(layer[1]) in self.layers


def layer_ranges(counts: Sequence[int]) -> list[LayerRange]:
    """Consecutive stages of `counts` layers."""
    parts, first = [], 0
    for count in counts:
        parts.append(LayerRange(first, first + count))
        first += count
    return parts


class RemoteStages(Protocol):
    """The later pipeline stages, as the first one sees them.

    changes  changes of this stage's KV caches, which the other stages apply before the next pass
    """

    changes: list[Change]

    def reserve(self, context: int) -> int:
        """Make the stages allocate memory for `context` tokens and forget all sequences. Return the
        prompt tokens that each runs at a time.

        Raises SpeqError if one of them cannot.
        """

    def begin(self, spans: Sequence[BatchSpan], reading: bool) -> None:
        """Announce a pass over these rows.

        reading  the rows are of a prompt, whose experts are loaded as in prefill
        """

    def run(self, hidden_states: Tensor) -> Tensor:
        """Run the rows [1, T, H] or [T, H] of that pass through the stages."""

    def check(self) -> None:
        """Raise EngineLost if one of them is gone. Call between passes only."""

    def close(self) -> None:
        """End the run."""


def returned(hidden_states: Tensor, others: Mapping[str, Any]) -> Any:
    """What a layer without an indexer returns, given these other arguments: layers that are given
    an earlier one's choice return theirs as well.
    """
    return (hidden_states, None) if CHOSEN in others else hidden_states


class MissingLayer(nn.Module):
    """Placeholder for a decoder layer of another machine: the identity.

    per_layer_input, others  arguments that transformers passes to layers
    """

    def forward(self, hidden_states: Tensor, per_layer_input: None = None, **others: Any) -> Any:
        known = (*CACHE_NAMES, *LAYER_ARGUMENTS, *GEMMA4, CHOSEN)
        refuse_unknown(type(self).__name__, others, known)
        return returned(hidden_states, others)


class NextStageLayer(MissingLayer):
    """The first layer that the first stage lacks: it sends its rows to the other machines.

    others  the stages there
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: RemoteStages | None = None

    def forward(self, hidden_states: Tensor, per_layer_input: None = None, **others: Any) -> Any:
        stages = present(self.others, "a pass began before the stages were joined")
        super().forward(hidden_states, per_layer_input, **others)
        return returned(stages.run(hidden_states), others)


class StageInput(nn.Module):
    """Replacement of the embedding: returns the rows of the stage before.

    hidden_states  [T, H] of the next pass
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: Tensor | None = None

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = present(self.hidden_states, "a pass began before its rows arrived")
        return rows.view(*token_ids.shape, -1)


def own_layers(body: Any) -> list[nn.Module]:
    """Decoder layers that are on this machine."""
    return [layer for layer in body.layers if not isinstance(layer, MissingLayer)]


def next_stage_layer(body: Any) -> NextStageLayer | None:
    """The layer that sends a model's rows to other machines; None: there is none."""
    return next((layer for layer in body.layers if isinstance(layer, NextStageLayer)), None)


@contextmanager
def build_part(family: Family, part: LayerRange | None) -> Iterator[None]:
    """Build models inside the block without experts and with only the layers of `part`. The rest is
    never created, not even on the meta device.
    """
    with family.without_experts():
        if part is None:
            yield
            return
        names = vars(importlib.import_module(family.module))
        whole = next(names[name] for name in names if name.endswith("ForCausalLM"))
        finish = whole.post_init

        def post_init(model: Any) -> None:
            leave_out(model, part, family.last_norm)
            finish(model)

        inherited = "post_init" not in vars(whole)
        whole.post_init = post_init
        try:
            yield
        finally:
            if inherited:
                del whole.post_init
            else:
                whole.post_init = finish


def leave_out(model: Any, part: LayerRange, last_norm: str) -> None:
    """Remove everything outside `part` from a model, before weights are loaded.

    last_norm  the model's name for the norm after its layers
    """
    body = model.model
    for index in range(len(body.layers)):
        if index not in part.layers:
            leaving = part.has_ends and index == part.last
            body.layers[index] = NextStageLayer() if leaving else MissingLayer()
    if not part.has_ends:
        body.set_input_embeddings(StageInput())
        setattr(body, last_norm, nn.Identity())
        model.lm_head = nn.Identity()
        model._tied_weights_keys = None
