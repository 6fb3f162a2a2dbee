"""The parts of a decoder layer: what mixes tokens, and a feed-forward."""

from typing import Any, NamedTuple

from torch import nn

from speq.models.dense_parts import ONLY_PART
from speq.models.family import Family
from speq.models.states import StateShape


class LayerParts(NamedTuple):
    """Parts of a layer; None where a layer of one part lacks it.

    mixer      attention, or what keeps a state in place of KV
    has_state  which of the two
    """

    mixer: nn.Module | None
    has_state: bool
    feed_forward: nn.Module | None


def parts_of(layer: Any, family: Family, states: StateShape) -> LayerParts:
    """Find the parts of one of transformers' layers."""
    state, only = states.mixer(layer), getattr(layer, ONLY_PART, None)
    if only is None:
        mixer = layer.self_attn if state is None else state
        return LayerParts(mixer, state is not None, getattr(layer, family.names.mlp))
    if state is not None or hasattr(only, "q_proj"):
        return LayerParts(only, state is not None, None)
    return LayerParts(None, False, only)
