"""Compares a pack with its checksums: records, tensors, files and draft codes."""

import hashlib
from functools import partial
from typing import Any

import torch

from speq.errors import FileError
from speq.experts.expert_store import expert_slot
from speq.experts.packed_draft import DRAFT_FILE
from speq.experts.packed_store import PackedExpertStore
from speq.files.range_file import RangeFile, bytes_of
from speq.models.opened import Opened
from speq.units import Progress, no_progress, track

BLOCK_BYTES = 16 << 20


def compare(
    opened: Opened, store: PackedExpertStore, progress: Progress = no_progress
) -> dict[str, Any]:
    """Read and compare all of a pack; return counts. Its files were compared when it was opened.

    Raises SpeqError for the first difference.
    """
    store.verify_reads = True
    slot = expert_slot(store)
    count = store.num_layers * store.num_experts
    for at in track("comparing experts", range(count), count, progress):
        store.compare(*divmod(at, store.num_experts), slot)
    if store.tied_draft is not None:
        compare_draft(opened, store.tied_draft.digest, progress)
    checkpoint = opened.checkpoint
    checkpoint.tensor_check().finish(partial(progress, "comparing tensors"))
    checksums = store.manifest.checksums
    return {
        "experts": len(store.manifest.records),
        "record_bytes": store.manifest.record_bytes,
        "tensors": len(checksums.tensors) if checksums else 0,
        "files": len(checksums.files) if checksums else 0,
        "dense": 0 if opened.dense is None else opened.dense.compare(),
        "draft": store.tied_draft is not None,
    }


def compare_draft(opened: Opened, digest: str, progress: Progress) -> None:
    """Raise SpeqError unless a residual pack has the draft codes that its records need."""
    found, block = hashlib.sha256(), torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with RangeFile(opened.checkpoint.path / DRAFT_FILE) as file:
        starts = range(0, file.size, BLOCK_BYTES)
        for at in track("comparing the draft", starts, len(starts), progress):
            part = block[: min(BLOCK_BYTES, file.size - at)]
            file.read_into(at, part)
            found.update(bytes_of(part))
        if found.hexdigest() != digest:
            raise FileError(
                f"{file.path} is not what was packed; pack the model again, and check the disk"
            )
