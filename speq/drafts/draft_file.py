"""A draft on disk: the INT4 arena as one safetensors file, made once and kept.

It lies beside the model, or in the user's cache folder where that cannot be written, under a name
that carries a digest of the weights and of the settings it was made with.
"""

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

import torch

from speq.errors import SpeqError
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.experts.int4 import GROUP_SIZE, Int4Arena
from speq.files.atomic_file import remove_abandoned, replacing
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import DTYPE_NAMES, SafetensorsFile
from speq.units import Done

logger = logging.getLogger("speq")

FOLDER = ".speq"
FORMAT = "speq-int4-1"


def digest_of(checkpoint: Checkpoint) -> str:
    """Names a draft: the weights it was made from and how."""
    settings = f"{FORMAT}:rtn:bits=4:group_size={GROUP_SIZE}:"
    return hashlib.sha256((settings + checkpoint.fingerprint()).encode()).hexdigest()[:16]


def candidate_paths(checkpoint: Checkpoint) -> list[Path]:
    """Where a draft of this checkpoint may lie, the preferred place first."""
    name = f"draft-int4-rtn-{digest_of(checkpoint)}.safetensors"
    paths = [checkpoint.path / FOLDER / name]
    with contextlib.suppress(RuntimeError):  # a user without a home
        paths.append(Path.home() / ".cache" / "speq" / "drafts" / name)
    return paths


def load_or_make(
    arena: Int4Arena, checkpoint: Checkpoint, store: ExpertStore, progress: Done | None = None
) -> None:
    """Fill `arena` from the draft on disk, or round the experts and keep the result.

    What others left half-written, and write no more, goes first: it is as large as a draft.
    """
    paths = candidate_paths(checkpoint)
    for path in paths:
        remove_abandoned(path.parent)
        if os.path.exists(path):  # which, unlike Path.exists, takes a locked folder for no
            try:
                read(arena, path)
                return
            except SpeqError as error:
                logger.warning("the draft on disk is made anew: %s", error)
    logger.info(
        "the draft is made by rounding; `speq quantize %s` makes a better one (GPTQ)",
        checkpoint.path,
    )
    quantize(arena, store, progress)
    keep(arena, paths)


def quantize(arena: Int4Arena, store: ExpertStore, progress: Done | None = None) -> None:
    """Round every expert of `store` to INT4, one slot in memory at a time."""
    slot = expert_slot(store)
    total = store.num_layers * store.num_experts
    for base_slot in range(total):
        exact = read_matrices(store, *divmod(base_slot, store.num_experts), slot)
        arena.quantize_into(base_slot, *exact)
        if progress is not None:
            progress(base_slot + 1, total)


def read(arena: Int4Arena, path: Path) -> None:
    """Fill `arena` from a file. Raises SpeqError where the file is damaged or of another shape."""
    with SafetensorsFile(path) as file:
        if file.metadata.get("format") != FORMAT:
            raise SpeqError(f"{path} is not a draft of format {FORMAT}; remove it")
        for name, part in arena.parts.items():
            info = file.tensors.get(name)
            if info is None or info.shape != tuple(part.shape) or info.dtype != part.dtype:
                raise SpeqError(f"{path} holds no {name} of shape {list(part.shape)}; remove it")
            nbytes = info.nbytes // len(part)
            for slot in range(len(part)):
                buffer = torch.empty(nbytes, dtype=torch.uint8)
                file.read_into(info.offset + slot * nbytes, buffer)
                part[slot].copy_(buffer.view(part.dtype).view(part[slot].shape))


def keep(arena: Int4Arena, paths: list[Path]) -> None:
    """Write `arena` to the first place that takes it; say so where none does."""
    reasons = []
    for path in paths:
        try:
            write(arena, path)
            return
        except (OSError, SpeqError) as error:
            reasons.append(f"{path.parent}: {getattr(error, 'strerror', None) or error}")
    logger.warning(
        "the draft could not be kept and will be made anew next time (%s)", "; ".join(reasons)
    )


def write(arena: Int4Arena, path: Path) -> None:
    """Write atomically: the file is either whole or absent. Raises OSError."""
    entries: dict[str, object] = {"__metadata__": {"format": FORMAT}}
    at = 0
    for name, part in arena.parts.items():
        entries[name] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [at, at + part.nbytes],
        }
        at += part.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for part in arena.parts.values():
            for slot in part:
                file.write(slot.cpu().contiguous().view(torch.uint8).numpy().data)
