"""The dense layers of a model that a draft may run on codes, by purpose."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from speq.experts.expert_names import ExpertNames

# Parts that a draft may have codes of. Attention includes what replaces it in a layer. MLP: shared
# experts, and the MLPs of layers without experts.
ATTENTION, MLP, HEAD = "attention", "mlp", "head"
# Expands latents to keys and values: the whole context in long passes, so reading its weights does
# not bound their time.
EXPANDING = "kv_b_proj"
# What families with layers of one part call it.
ONLY_PART = "mixer"
# What mixes tokens in layers of one part, which share a name with feed-forwards.
MIXING = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"})
# Small matrices that say how fast states fade.
DECAYING = ("in_proj_ba", "in_proj_a", "in_proj_b", "f_proj", "f_a_proj", "f_b_proj", "b_proj")
# Module of attention that chooses what it attends to, and its part that weighs its heads, which may
# be in a dtype of its own.
INDEXER, WEIGHING = "indexer", "indexer.weights_proj"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A dense layer: its name in the model and in the checkpoint, its part, and the sizes of its
    matrix [outputs, columns].
    """

    name: str
    part: str
    outputs: int
    columns: int

    @property
    def layer(self) -> int | None:
        """The decoder layer that it is part of; None for the head."""
        match = LAYER.search(self.name)
        return None if match is None else int(match[1])


def dense_shapes(model: Any, names: ExpertNames) -> tuple[DenseShape, ...]:
    """Dense layers of a model, in module order, without routers, gates of shared experts, norms and
    embeddings.

    names  names of a layer's MLP and of its projections
    """
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:  # others do not multiply by all of their matrix
            part = HEAD if module is head else part_of(name, names)
            if part is not None:
                found.append(DenseShape(name, part, module.out_features, module.in_features))
    return tuple(found)


def part_of(name: str, names: ExpertNames) -> str | None:
    """The part of a module inside a layer; None if drafts run the exact one."""
    *inside, own = name.split(".")
    if own in DECAYING or INDEXER in inside:
        return None
    if "linear_attn" in inside:
        return ATTENTION
    if not {"conv", "mamba"}.isdisjoint(inside) or (ONLY_PART in inside and own in MIXING):
        return ATTENTION
    if "self_attn" in inside:
        return None if own == EXPANDING else ATTENTION
    is_mlp = names.mlp in inside and own in names.projection_of
    return MLP if is_mlp or "shared_mlp" in inside else None
