"""Checks that a quantised checkpoint was made from the model that it drafts for."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.drafts.gptq_config import OF_THIS_MODEL
from speq.drafts.gptq_folder import GptqFolder
from speq.errors import CheckpointError
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.kernels.ops import matrices_of

Tensors = dict[str, tuple[SafetensorsFile, TensorInfo]]
# Sizes that two configs of one model share, if both name them; by all their names.
SIZES = (
    ("model_type",),
    ("num_hidden_layers",),
    ("hidden_size",),
    ("intermediate_size",),
    ("moe_intermediate_size",),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings)\.weight$")
# Elements compared of a tensor, and rows of each matrix of an expert.
SAMPLE = 1 << 16
SAMPLE_ROWS = 64
# Squared error relative to the weights: some hundredths for rounding, 2 for unrelated weights.
MAX_ERROR = 0.5


def check_sizes(path: Path, config: dict[str, Any], model: Checkpoint) -> None:
    """Raise SpeqError if the config of the draft at `path` has another model's sizes."""
    theirs = config if model.part is None else model.part.config(config, path)
    ours = model.model_config
    for names in SIZES:
        given = [name for name in names if name in theirs]
        wanted = [name for name in names if name in ours]
        if given and wanted and theirs[given[0]] != ours[wanted[0]]:
            raise CheckpointError(
                f"draft {path} does not fit the model: its config.json has {given[0]} "
                f"{theirs[given[0]]!r} and the model's has {ours[wanted[0]]!r}; "
                f"{OF_THIS_MODEL}"
            )


def check_weights(path: Path, tensors: Tensors, model: Checkpoint, names: ExpertNames) -> None:
    """Raise SpeqError if routers of the draft at `path` are not the model's.

    Quantisers do not change routers. If both have none in common, embeddings are compared; without
    those, the model cannot be identified.

    names  names of routers in either
    """
    for pattern in (names.router, EMBEDDING):
        ours, theirs = (_floats(pattern, held) for held in (model.tensors, tensors))
        shared = sorted(ours.keys() & theirs.keys())
        for key in shared:
            name, file, info = theirs[key]
            _, own_file, own = ours[key]
            if info.shape != own.shape or not equal_up_to_rounding(
                _sample(file, info), _sample(own_file, own)
            ):
                raise CheckpointError(
                    f"draft {path} was made from another model: its {name}, which is not "
                    f"quantised, differs from the model's; {OF_THIS_MODEL}"
                )
        if shared:
            return
    raise CheckpointError(
        f"draft {path} has no router and no embedding in common with the model, so it cannot be "
        "compared with it; quantise without changing either"
    )


def check_experts(draft: GptqFolder, store: ExpertStore) -> None:
    """Raise SpeqError if the first expert of a draft is not close to the model's own.

    Another model may have the same routers, and a checkpoint may order gate and up otherwise.
    """
    gate_up_proj, down_proj = read_matrices(store, 0, 0, expert_slot(store))
    count = min(SAMPLE_ROWS, *down_proj.shape)
    rows = [matrix[:count] for matrix in matrices_of(gate_up_proj, down_proj)]
    exact = torch.cat([part.float().flatten() for part in rows])
    error = float((draft.sample(0, count) - exact).square().sum())
    if not error <= MAX_ERROR * float(exact.square().sum()):
        raise CheckpointError(
            f"draft {draft.path} was made from another model, or has gate and up in another order: "
            "its first expert is nowhere near the model's; give a draft of this very checkpoint"
        )


def equal_up_to_rounding(one: Tensor, other: Tensor) -> bool:
    """True if float tensors are equal, up to rounding either to the other's dtype."""
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    infos = [torch.finfo(tensor.dtype) for tensor in (one, other)]
    coarsest = max(info.eps for info in infos)
    smallest = max(info.smallest_normal * info.eps for info in infos)
    return torch.allclose(one.double(), other.double(), rtol=coarsest, atol=smallest)


def _floats(
    pattern: re.Pattern[str], tensors: Tensors
) -> dict[tuple[str, ...], tuple[str, SafetensorsFile, TensorInfo]]:
    """Float tensors whose names match, by the pattern's groups."""
    found = {}
    for name, (file, info) in tensors.items():
        match = pattern.search(name)
        if match is not None and info.dtype.is_floating_point:
            found[match.groups()] = (name, file, info)
    return found


def _sample(file: SafetensorsFile, info: TensorInfo) -> Tensor:
    nbytes = min(info.nbytes, SAMPLE * info.dtype.itemsize)
    data = torch.empty(nbytes, dtype=torch.uint8)
    file.read_into(info.offset, data)
    return data.view(info.dtype)
