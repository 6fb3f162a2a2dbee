"""A rounded draft on disk: codes in one safetensors file, made once and cached.

The file is beside the model, or in the user's cache folder if that cannot be written. Its name has
a digest of the weights and of the settings it was made with.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from speq.errors import CheckpointError, SpeqError
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.experts.int4 import GROUP_SIZE, Int4Arena
from speq.files.atomic_file import remove_abandoned, replacing
from speq.files.cache_folder import BESIDE, DRAFTS, cache_folder
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import DTYPE_NAMES, SafetensorsFile
from speq.units import Done

logger = logging.getLogger("speq")

FOLDER = BESIDE
FORMAT = "speq-int4-1"
COPY_BYTES = 1 << 20


class RowSelection(NamedTuple):
    """Selected rows of a file's tensors: their numbers, and the number of rows of a tensor."""

    wanted: Sequence[int]
    total: int


def digest_of(checkpoint: Checkpoint) -> str:
    """Digest of a draft: the weights it was made from, and the settings."""
    settings = f"{FORMAT}:rtn:bits=4:group_size={GROUP_SIZE}:"
    return hashlib.sha256((settings + checkpoint.fingerprint()).encode()).hexdigest()[:16]


def candidate_paths(checkpoint: Checkpoint, what: str = "") -> list[Path]:
    """Paths of a draft of this checkpoint, the preferred one first.

    what  part of the model; empty: the experts
    """
    name = f"draft-int4-rtn-{what and what + '-'}{digest_of(checkpoint)}.safetensors"
    paths, cache = [checkpoint.path / FOLDER / name], cache_folder(DRAFTS)
    if cache is not None:
        paths.append(cache / name)
    return paths


def load_or_make(
    arena: Int4Arena,
    checkpoint: Checkpoint,
    store: ExpertStore,
    progress: Done | None = None,
    quantisable: bool = True,
) -> None:
    """Fill `arena` from the draft on disk, or round the experts and cache the result.

    An arena of some experts is filled from a cached draft of all experts if there is one. Otherwise
    its rounded experts are cached under a name of their own.

    progress     called with (done, total); reaches total once the result is cached
    quantisable  whether `speq quantize` takes the model
    """
    paths = candidate_paths(checkpoint)
    rows = None if arena.whole else RowSelection(arena.held, arena.base_slots.numel())
    if not arena.held or read_cached(arena.parts, paths, progress, rows):
        return
    if not arena.whole:
        paths = candidate_paths(checkpoint, f"some-{digest_of_experts(arena.held)}")
        if read_cached(arena.parts, paths, progress):
            return
    better = f"; `speq quantize {checkpoint.path}` makes a better one (GPTQ)"
    logger.info("the draft is made by rounding%s", better if quantisable else "")
    experts = len(arena.held)
    told = None if progress is None else lambda done, _: progress(done, experts + 1)
    quantize(arena, store, told)
    keep(arena.parts, paths)
    if progress is not None:
        progress(experts + 1, experts + 1)


def any_exists(paths: list[Path]) -> bool:
    # Unlike Path.exists, it returns False for a folder without permission.
    return any(os.path.exists(path) for path in paths)


def digest_of_experts(held: Sequence[int]) -> str:
    """Digest of a selection of a model's experts."""
    return hashlib.sha256(",".join(map(str, held)).encode()).hexdigest()[:8]


def read_cached(
    parts: Mapping[str, Tensor],
    paths: list[Path],
    progress: Done | None = None,
    rows: RowSelection | None = None,
) -> bool:
    """Fill tensors from the first usable file. Return False if there is none.

    rows  rows of the files' tensors to read; None: all

    Abandoned partial files are removed first: they are as large as a draft.
    """
    for path in paths:
        remove_abandoned(path.parent)
        if os.path.exists(path):  # unlike Path.exists, False for a folder without permission
            try:
                read(parts, path, progress, rows)
                return True
            except SpeqError as error:
                logger.warning("the draft on disk is made again: %s", error)
    return False


def quantize(arena: Int4Arena, store: ExpertStore, progress: Done | None = None) -> None:
    """Round the experts of `store` that `arena` holds, one slot in memory at a time."""
    slot = expert_slot(store)
    for base_slot, at in enumerate(arena.held):
        exact = read_matrices(store, *divmod(at, store.num_experts), slot)
        arena.quantize_into(base_slot, *exact)
        if progress is not None:
            progress(base_slot + 1, len(arena.held))


def read(
    parts: Mapping[str, Tensor],
    path: Path,
    progress: Done | None = None,
    rows: RowSelection | None = None,
) -> None:
    """Fill tensors from a file. Raises SpeqError if the file is damaged or has other shapes.

    progress  called with (MiB done, MiB in all)
    rows      rows of the file's tensors to read; None: all
    """
    with SafetensorsFile(path) as file:
        if file.metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a draft of format {FORMAT}; remove it")
        done, total = 0, sum(part.nbytes for part in parts.values())
        for name, part in parts.items():
            info = file.tensors.get(name)
            shape = (len(part) if rows is None else rows.total, *part.shape[1:])
            if info is None or info.shape != shape or info.dtype != part.dtype:
                raise CheckpointError(f"{path} holds no {name} of shape {list(shape)}; remove it")
            for first, block in pieces_of(part, rows):
                buffer = torch.empty(block.nbytes, dtype=torch.uint8)
                file.read_into(info.offset + first * (block.nbytes // len(block)), buffer)
                block.copy_(buffer.view(part.dtype).view(block.shape))
                done += block.nbytes
                if progress is not None:
                    progress(done >> 20, total >> 20)


def blocks_of(part: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor along its first dimension into pieces that are transferred at a time."""
    return part.split(max(COPY_BYTES * len(part) // max(part.nbytes, 1), 1))


def pieces_of(part: Tensor, rows: RowSelection | None) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of a tensor, each with the number of its first row in a file."""
    first = 0
    for block in blocks_of(part) if rows is None else part.split(1):
        yield (first if rows is None else rows.wanted[first]), block
        first += len(block)


def keep(parts: Mapping[str, Tensor], paths: list[Path]) -> None:
    """Write tensors to the first path that can be written; warn if none can."""
    reasons = []
    for path in paths:
        try:
            # A file beside its model need not name it.
            write(parts, path, None if path == paths[0] else paths[0].parent.parent)
            return
        except (OSError, SpeqError) as error:
            reasons.append(f"{path.parent}: {getattr(error, 'strerror', None) or error}")
    logger.warning(
        "the draft could not be cached and will be made again next time (%s)", "; ".join(reasons)
    )


def write(parts: Mapping[str, Tensor], path: Path, model: Path | None = None) -> None:
    """Write atomically: the file is either complete or absent. Raises OSError.

    model  its folder, recorded for `speq cache`
    """
    metadata = {"format": FORMAT}
    if model is not None:
        metadata["model"] = os.path.realpath(model)
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, part in parts.items():
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
        for part in parts.values():
            for block in blocks_of(part):
                file.write(block.cpu().contiguous().view(torch.uint8).numpy().data)
