"""The dense layers of a model that a draft may run on codes, by what they are for."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from speq.experts.expert_names import ExpertNames

# What a draft may have codes of. Attention: what stands in its place, too. MLP: shared experts, and
# the MLPs of layers without experts.
ATTENTION, MLP, HEAD = "attention", "mlp", "head"
# It multiplies the whole context at each pass, so that reading its weights is not what takes time.
EXPANDING = "kv_b_proj"
# Small matrices that say how fast states fade.
DECAYING = ("in_proj_ba", "in_proj_a", "in_proj_b")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A dense layer: the name of its module, which the model's checkpoint has for it too, its part
    and its matrix' sizes [outputs, columns].
    """

    name: str
    part: str
    outputs: int
    columns: int

    @property
    def layer(self) -> int | None:
        """The decoder layer that it is part of; None of the head."""
        match = LAYER.search(self.name)
        return None if match is None else int(match[1])


def dense_shapes(model: Any, names: ExpertNames) -> tuple[DenseShape, ...]:
    """Those of a model, in the order of its modules. Routers, gates of shared experts, norms and
    embeddings are none.

    names  which say what a layer calls its MLP, and that its projections
    """
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            part = HEAD if module is head else part_of(name, names)
            if part is not None:
                found.append(DenseShape(name, part, module.out_features, module.in_features))
    return tuple(found)


def part_of(name: str, names: ExpertNames) -> str | None:
    """The part of a module inside a layer; None where drafts run the exact one."""
    *inside, own = name.split(".")
    if "linear_attn" in inside:
        return None if own in DECAYING else ATTENTION
    if "conv" in inside:
        return ATTENTION
    if "self_attn" in inside:
        return None if own == EXPANDING else ATTENTION
    return MLP if names.mlp in inside and own in names.projection_of else None
