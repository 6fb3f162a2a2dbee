"""A model of real size with a real function: a small trained one, widened.

Every hidden unit is copied r times and every expert neuron m times (attention heads too, unless
they are kept); a weight that reads copies is divided by their number, so that the wide model
computes what the small one does. Noise that sums to zero over the copies makes its weights look
trained: without it INT4 would round all copies alike, as well or badly as it rounds the source.

Routing and text are then a trained model's, while bytes and kernels are of real size. Acceptance is
one with `draft_noise` (`speq.bench.widen_draft`); without it nearly every draft stands.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speq.bench.settings import WidenSettings as Settings
from speq.bench.widen_draft import DraftFolder, Placed, group_size_for, rounding_error
from speq.bench.widen_head import widen_head
from speq.bench.widen_words import drawn_for, shared_out
from speq.errors import FileError, NoRoom, OptionError, UnsupportedError, checked_int
from speq.files.atomic_file import writing
from speq.files.checkpoint import Checkpoint, locate
from speq.models.families import FAMILIES
from speq.units import Progress, format_bytes

FAMILY = "qwen2_moe"
# What a draft has in codes: experts, shared experts, dense layers and attention.
PACKED = re.compile(r"\.layers\..*\.(?:[qkvo]|gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True)
class Copies:
    """How often outputs and inputs of a matrix are copied; (n, 1) for a vector of n copies."""

    outputs: int
    inputs: int


def run(
    source: str, target: Path, settings: Settings, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the widened checkpoint; return what it is. Raises SpeqError for what cannot be."""
    checkpoint = Checkpoint(locate(source))
    try:
        config = widened_config(checkpoint.config, settings, checkpoint.path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileError(
                f"{target} exists already; give a folder that is empty or not there yet"
            )
        needed = wide_bytes(checkpoint, settings)
        free = shutil.disk_usage(existing_parent(target)).free
        if needed > free:
            raise NoRoom(
                f"the widened model takes {format_bytes(needed)} and {format_bytes(free)} of disk "
                f"are left at {target}; free some, or give a smaller hidden size or expert width"
            )
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
            draft = None
            if settings.draft_noise:
                draft = DraftFolder(target, group_size_for(inputs_of(config)))
            total = write_shards(checkpoint, config, settings, target, draft, progress)
            write_rest(checkpoint.path, config, settings, target)
            if draft is not None:
                draft.finish(target)
            hidden, _, _ = copies(checkpoint.config, settings)
            family = FAMILIES[FAMILY]
            has_head = widen_head(checkpoint, target, family, hidden, settings.noise, settings.seed)
    finally:
        checkpoint.close()
    made = {
        "path": str(target),
        "bytes": total,
        "settings": settings.as_json(),
        "head": has_head,
    }
    return made if draft is None else made | {"draft": draft.moves.as_json()}


def widened_config(config: dict[str, Any], settings: Settings, where: Path) -> dict[str, Any]:
    """config.json of the wide model. Raises SpeqError for nonsense."""
    if config.get("model_type") != FAMILY:
        raise UnsupportedError(
            f"{where} is of family {config.get('model_type')!r}; only {FAMILY} widens"
        )
    for name, given, size in (
        ("hidden_size", settings.hidden_size, config["hidden_size"]),
        ("expert_width", settings.expert_width, config["moe_intermediate_size"]),
    ):
        checked_int(name, given, size)
        if given % size:
            raise OptionError(f"{name} is {given}; it must be a multiple of the source's {size}")
    _, neurons, heads = copies(config, settings)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_size": settings.hidden_size,
        "moe_intermediate_size": settings.expert_width,
        "shared_expert_intermediate_size": config["shared_expert_intermediate_size"] * neurons,
        "intermediate_size": config["intermediate_size"] * neurons,
        "num_attention_heads": config["num_attention_heads"] * heads,
        "num_key_value_heads": config["num_key_value_heads"] * heads,
        "head_dim": head_dim,
    }


def copies(config: dict[str, Any], settings: Settings) -> tuple[int, int, int]:
    """Copies of a hidden unit, of a neuron and of an attention head of the source."""
    hidden = settings.hidden_size // config["hidden_size"]
    neurons = settings.expert_width // config["moe_intermediate_size"]
    return hidden, neurons, hidden if settings.heads == "copy" else 1


def copies_of(name: str, hidden: int, neurons: int, heads: int) -> Copies:
    """How a tensor of the source grows, by its name."""
    kind = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name
    grows = {
        "embed_tokens": Copies(1, hidden),
        "lm_head": Copies(1, hidden),
        "q_proj": Copies(heads, hidden),
        "k_proj": Copies(heads, hidden),
        "v_proj": Copies(heads, hidden),
        "o_proj": Copies(hidden, heads),
        "gate": Copies(1, hidden),
        "shared_expert_gate": Copies(1, hidden),
        "gate_proj": Copies(neurons, hidden),
        "up_proj": Copies(neurons, hidden),
        "down_proj": Copies(hidden, neurons),
        "input_layernorm": Copies(hidden, 1),
        "post_attention_layernorm": Copies(hidden, 1),
        "norm": Copies(hidden, 1),
    }
    if kind not in grows:
        raise OptionError(f"tensor {name} is none that a {FAMILY} model has; it cannot be widened")
    return grows[kind]


def widen(name: str, weight: Tensor, copy: Copies, settings: Settings, head_dim: int) -> Tensor:
    """One tensor of the wide model, in the dtype of the source's."""
    if weight.dim() == 1:
        # A bias goes with whole heads, a norm with units.
        if name.endswith(".bias"):
            return weight.view(-1, head_dim).repeat_interleave(copy.outputs, 0).flatten()
        return weight.repeat_interleave(copy.outputs)
    if name.endswith("embed_tokens.weight"):
        return weight.repeat_interleave(copy.inputs, 1)  # what is read is the unit itself
    by_head = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    if by_head:
        rows = weight.unflatten(0, (-1, head_dim)).repeat_interleave(copy.outputs, 0).flatten(0, 1)
    else:
        rows = weight.repeat_interleave(copy.outputs, 0)
    if copy.inputs == 1:
        return rows
    parts = shared_out(rows, copy.inputs, settings.noise, drawn_for(name, settings.seed))
    if name.endswith("o_proj.weight"):  # inputs are whole heads, too
        heads = parts.unflatten(1, (-1, head_dim))
        return heads.transpose(2, 3).flatten(1).contiguous()
    return parts.flatten(1)


def inputs_of(config: dict[str, Any]) -> set[int]:
    """Columns of the matrices that a draft has in codes."""
    return {
        config["hidden_size"],
        config["num_attention_heads"] * config["head_dim"],
        config["moe_intermediate_size"],
        config["shared_expert_intermediate_size"],
        config["intermediate_size"],
    }


def place_copies(name: str, shape: torch.Size, copy: Copies, head_dim: int) -> Placed:
    """Where `widen` puts the copies of a matrix [N, K]."""
    rows, columns = torch.arange(shape[0]), torch.arange(shape[1] * copy.inputs)
    if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
        rows = rows.view(-1, head_dim).repeat_interleave(copy.outputs, 0).flatten()
    else:
        rows = rows.repeat_interleave(copy.outputs)
    if name.endswith("o_proj.weight"):
        heads = columns.view(-1, copy.inputs, head_dim)
        return Placed(rows, heads.transpose(1, 2).reshape(shape[1], copy.inputs))
    return Placed(rows, columns.view(shape[1], copy.inputs))


def groups(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Tensor names by the shard they go to: one for each layer, and one for the rest."""
    found: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors):
        parts = name.split(".")
        layer = f"{int(parts[2]):05d}" if parts[1] == "layers" else "rest"
        found.setdefault(layer, []).append(name)
    return found


def write_shards(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    settings: Settings,
    target: Path,
    draft: DraftFolder | None,
    progress: Progress | None,
) -> int:
    """Write one shard at a time, of the model and of its draft, and the index; return the bytes of
    all tensors of the model.
    """
    hidden, neurons, heads = copies(checkpoint.config, settings)
    router = FAMILIES[FAMILY].names.router
    weight_map: dict[str, str] = {}
    total = 0
    shards = groups(checkpoint)
    for done, (label, names) in enumerate(shards.items()):
        if progress is not None:
            progress("widening", done, len(shards))
        tensors: dict[str, Tensor] = {}
        codes: dict[str, Tensor] = {}
        for name in names:
            copy = copies_of(name, hidden, neurons, heads)
            weight = checkpoint.tensors[name][0].tensor(name)
            if name == "model.norm.weight" and config.get("tie_word_embeddings"):
                weight = weight / hidden  # the head, which reads every copy, is the embedding
            wide = widen(name, weight, copy, settings, config["head_dim"])
            tensors[name] = wide
            total += wide.nbytes
            if draft is None:
                continue
            if PACKED.search(name):
                error = rounding_error(weight) * settings.draft_noise
                lie = place_copies(name, weight.shape, copy, config["head_dim"])
                codes |= draft.matrix(name, wide, error, lie)
            elif router.search(name):
                codes[name] = wide  # by which a draft is known to be this model's
        file = f"model-{label}.safetensors"
        if draft is not None and codes:
            draft.shard(file, codes)
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if progress is not None:
        progress("widening", len(shards), len(shards))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def wide_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    """Bytes of the widened tensors."""
    hidden, neurons, heads = copies(checkpoint.config, settings)
    total = 0
    for name, (_, info) in checkpoint.tensors.items():
        copy = copies_of(name, hidden, neurons, heads)
        total += info.nbytes * copy.outputs * (copy.inputs if len(info.shape) > 1 else 1)
    return total


def write_rest(source: Path, config: dict[str, Any], settings: Settings, target: Path) -> None:
    """config.json, and whatever else lies beside the weights."""
    for file in source.iterdir():
        weights = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in ("config.json", "README.md"):
            shutil.copy(file, target / file.name)
    origin = {"source": source.name, **settings.as_json()}
    (target / "widened.json").write_text(json.dumps(origin, indent=1) + "\n")
    # Last: a folder without it is no model.
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
