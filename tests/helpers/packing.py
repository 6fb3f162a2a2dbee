"""Models packed by tests."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.experts import pack as pack_module
from speq.experts import record_writer
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.pack import pack
from speq.models.opened import Opened, open_model
from speq.quantizing.models import packing_of
from speq.units import Progress, no_progress

# What packing passes, to be killed there.
MOMENTS = (
    (SafetensorsExpertStore, "read"),
    (record_writer, "crc32_of"),
    (record_writer, "bytes_of"),
    (pack_module, "copy_tensors"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "unlink"),
    (Path, "mkdir"),
)


def records_of(model: Path) -> list[Tensor]:
    """Every expert's record, by the store that a model folder has."""
    opened = open_model(model)
    store = opened.store
    found = []
    for at in range(store.num_layers * store.num_experts):
        slot = expert_slot(store)
        store.read(*divmod(at, store.num_experts), slot)
        found.append(slot[: store.record_bytes(*divmod(at, store.num_experts))])
    opened.close()
    return found


def same(model: Path, packed: Path) -> bool:
    pairs = zip(records_of(model), records_of(packed), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def pack_to(
    model: Path,
    out: Path,
    progress: Progress = no_progress,
    codec: str = "raw",
    draft: str = "auto",
) -> Opened:
    """Pack a model and open the result."""
    opened = open_model(model)
    try:
        assert isinstance(opened.store, SafetensorsExpertStore)
        packing = packing_of(opened, codec, draft)
        try:
            pack(opened.checkpoint, opened.store, out, packing, progress)
        finally:
            if packing.draft is not None:
                packing.draft.close()
    finally:
        opened.close()
    return open_model(out)


def without_checksums(packed: Path, **changes: Any) -> None:
    """The manifest as an earlier version wrote it, with changes."""
    path = packed / "experts.json"
    entries = json.loads(path.read_text())
    del entries["crc32"], entries["checksums"]
    path.write_text(json.dumps(entries | changes))
