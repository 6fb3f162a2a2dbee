"""The draft head of a widened model: the source's, widened as the model is. Names of experts are
left out: the wide model has others.

Hidden units and attention heads are copied as often as the model's, and so are a branch's neurons;
a weight that reads copies is shared out over them. The wide head says what the source's says.
"""

from pathlib import Path

import torch
from torch import Tensor

from speq.bench.widen_words import drawn_for, shared_out
from speq.errors import OptionError
from speq.files.checkpoint import Checkpoint
from speq.heads.head_file import head_path, model_digest, read_head, write_head
from speq.heads.head_shape import HeadShape
from speq.heads.moe_head import MoEHead
from speq.models.family import Family


def widen_head(
    source: Checkpoint, target: Path, family: Family, hidden: int, noise: float, seed: int
) -> bool:
    """Write the head beside a widened model; whether there is one to widen.

    hidden  copies of each hidden unit

    Raises SpeqError where the source's is damaged, another model's, or of sizes that do not widen.
    """
    path = head_path(source.path)
    if not path.exists():
        return False
    head = read_head(path, model_digest(source, family.names), source.config["hidden_size"])
    wide = widen_tensor(head, hidden, noise, seed, bool(source.config.get("tie_word_embeddings")))
    made = Checkpoint(target)
    try:
        digest = model_digest(made, family.names)
    finally:
        made.close()
    out = head_path(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_head(out, wide, digest, head.weight("enter").dtype)
    return True


def widen_tensor(head: MoEHead, hidden: int, noise: float, seed: int, tied: bool) -> MoEHead:
    """The head of a model of `hidden` copies of each unit.

    tied  the model's head is its embedding, which reads every copy: features are as many times
          smaller, and so is what the head adds to them
    """
    shape, scale = head.shape, hidden if tied else 1
    wide = HeadShape(
        shape.hidden_size * hidden,
        shape.width * hidden,
        shape.branches,
        shape.contrast,
        shape.window,
    )
    if wide.head_width != shape.head_width:
        raise OptionError(
            f"the draft head's attention has heads of {shape.head_width}, and widened {hidden} "
            f"times of {wide.head_width}, which attend otherwise; give another hidden size, or "
            "remove the source's head"
        )
    # What enters the residual is divided, and what reads it without a norm is multiplied.
    scales = {"enter": 1 / scale, "output": 1 / scale, "gate": scale, "contrast": scale}
    weights: dict[str, Tensor] = {}
    for name, _ in wide.tensors():
        kind = name.partition(".")[0]
        weight = head.weight(name).detach()
        weight = weight * scales.get(kind, 1 / scale if kind == "down" else 1)
        drawn = drawn_for(name, seed)
        weights[name] = _widened(kind, weight, hidden, shape.head_width, noise, drawn)
    return MoEHead(wide, weights, head.acceptance_rates).requires_grad_(False)


def _widened(
    kind: str, weight: Tensor, copies: int, head_width: int, noise: float, drawn: torch.Generator
) -> Tensor:
    """One tensor."""
    if kind == "contrast_bias":
        return weight
    if weight.dim() == 1:
        return weight.repeat_interleave(copies)
    rows = weight
    if kind == "qkv":
        rows = weight.unflatten(0, (-1, head_width)).repeat_interleave(copies, 0).flatten(0, 1)
    elif kind not in ("gate", "contrast"):  # of which each row says one number
        rows = weight.repeat_interleave(copies, 0)
    parts = shared_out(rows, copies, noise, drawn)
    if kind == "output":  # its inputs are whole heads, too
        return parts.unflatten(1, (-1, head_width)).transpose(2, 3).flatten(1).contiguous()
    return parts.flatten(1)
