"""Some layers of a model, where other machines hold the rest: a stage of several.

The first stage has the embedding, the last norm and the head as well. Its pass goes through its own
layers, then leaves the machine for those of the others, and comes back to the norm. So what calls
the model need not know of it.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from speq.errors import present
from speq.layers.arguments import CACHE_NAMES, LAYER_ARGUMENTS, refuse_unknown
from speq.models.bounds import LAYER
from speq.models.families import Family
from speq.models.kv_cache import Change
from speq.models.packed_batch import BatchSpan

# What layers of gemma4 are given besides: keys and values that layers share, which ours do not.
GEMMA4 = ("shared_kv_states",)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` up to `last`, which is behind them, by their numbers in the whole model."""

    first: int
    last: int

    @property
    def layers(self) -> range:
        return range(self.first, self.last)

    @property
    def has_ends(self) -> bool:
        """Whether the embedding, the last norm and the head belong to it."""
        return self.first == 0

    def holds(self, name: str) -> bool:
        """Whether it has the tensor of that name on disk, if the model does."""
        layer = LAYER.search(name)
        return self.has_ends if layer is None else int(layer[1]) in self.layers


def layer_ranges(counts: Sequence[int]) -> list[LayerRange]:
    """Stages of so many layers each, one behind another."""
    parts, first = [], 0
    for count in counts:
        parts.append(LayerRange(first, first + count))
        first += count
    return parts


class RemoteStages(Protocol):
    """The stages behind the first one, as it sees them.

    changes  of KV caches here, which those of the other stages follow before the next pass
    """

    changes: list[Change]

    def reserve(self, context: int) -> int:
        """Have them lay out memory for so many tokens, and forget all texts; tokens of a prompt
        that each of them runs at a time.

        Raises SpeqError where one of them cannot.
        """

    def begin(self, spans: Sequence[BatchSpan], reading: bool) -> None:
        """A pass follows of these rows. reading: of a prompt, whose experts come as a prompt's."""

    def run(self, hidden_states: Tensor) -> Tensor:
        """What they make of the rows [1, T, H] or [T, H] of that pass."""

    def check(self) -> None:
        """Raise EngineLost where one of them is gone. Between passes only."""

    def close(self) -> None:
        """The run is over."""


class MissingLayer(nn.Module):
    """A decoder layer of another machine, which does nothing here.

    per_layer_input, others  as transformers gives them to layers
    """

    def forward(self, hidden_states: Tensor, per_layer_input: None = None, **others: Any) -> Tensor:
        refuse_unknown(type(self).__name__, others, (*CACHE_NAMES, *LAYER_ARGUMENTS, *GEMMA4))
        return hidden_states


class NextStageLayer(MissingLayer):
    """The first layer that the first stage has not. Rows that come to it go to other machines.

    others  the stages there
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: RemoteStages | None = None

    def forward(self, hidden_states: Tensor, per_layer_input: None = None, **others: Any) -> Tensor:
        stages = present(self.others, "a pass came before the stages were joined")
        return stages.run(super().forward(hidden_states, per_layer_input, **others))


class StageInput(nn.Module):
    """In the place of an embedding: rows that the stage before has made.

    hidden_states  [T, H] of the pass that follows
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: Tensor | None = None

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = present(self.hidden_states, "a pass came before its rows")
        return rows.view(*token_ids.shape, -1)


def own_layers(body: Any) -> list[nn.Module]:
    """The decoder layers that a model has itself."""
    return [layer for layer in body.layers if not isinstance(layer, MissingLayer)]


def next_stage_layer(body: Any) -> NextStageLayer | None:
    """Where a model's rows leave the machine; None: they do not."""
    return next((layer for layer in body.layers if isinstance(layer, NextStageLayer)), None)


@contextmanager
def built(family: Family, part: LayerRange | None) -> Iterator[None]:
    """Models built inside the block have no experts, and only the layers of `part`. What they lack
    is never made, in memory or on the meta device.
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
    """Leave all of a model out that is not of a part, before anything is loaded into it.

    last_norm  what the model calls the norm behind its layers
    """
    body = model.model
    for index in range(len(body.layers)):
        if index not in part.layers:
            leaving = part.has_ends and index == part.last
            body.layers[index] = NextStageLayer() if leaving else MissingLayer()
    if not part.has_ends:
        body.embed_tokens = StageInput()
        setattr(body, last_norm, nn.Identity())
        model.lm_head = nn.Identity()
        model._tied_weights_keys = None
