"""Writes a packed model: its experts as records, all else as it was.

A folder becomes a model with its last file, config.json. Whatever is interrupted before that leaves
a folder that no run opens, and that the same command goes on with (`record_writer`).
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from speq.errors import SpeqError
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.packed_store import Manifest, dtype_name
from speq.experts.record_writer import Packing, journalled, write_records
from speq.files.atomic_file import replacing
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST, INDEX, SINGLE, Checkpoint
from speq.files.range_file import bytes_of
from speq.files.safetensors_file import SafetensorsFile, TensorInfo, header_of
from speq.units import Done, format_bytes

COPY_BYTES = 16 << 20


def pack(
    checkpoint: Checkpoint,
    store: SafetensorsExpertStore,
    out: Path,
    packing: Packing | None = None,
    progress: Done | None = None,
) -> Manifest:
    """Write `out`, or finish what an earlier run began there.

    packing   what experts become; None: raw records
    progress  told (experts, of all)

    Raises SpeqError where the folder is taken, the disk is full or cannot be written.
    """
    packing = packing or Packing(store.codec)
    codec = packing.codec
    begun = (out / EXPERTS_JOURNAL).exists()
    if (out / "config.json").exists() and not begun:
        raise SpeqError(f"{out} is a model already; give a folder that is not there yet")
    # What `replacing` leaves behind where it is killed.
    stale = list(out.glob("*.partial")) if out.is_dir() else []
    if out.exists() and not begun and set(out.iterdir()) != set(stale):
        raise SpeqError(f"{out} exists and holds other files; give a folder that is not there yet")
    source = checkpoint.fingerprint()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for partial in stale:
            partial.unlink()
        done = journalled(out, packing, source)
        left = store.num_layers * store.num_experts - len(done)
        check_room(checkpoint, store.names, packing.most_bytes(left), out)
        records, draft = write_records(store, packing, out, done, progress)
        write_non_experts(checkpoint, store.names, out)
        manifest = Manifest(
            codec=codec.name,
            dtype=dtype_name(codec.shape.dtype),
            hidden_size=codec.shape.hidden_size,
            expert_width=codec.shape.expert_width,
            num_layers=store.num_layers,
            num_experts=store.num_experts,
            source=source,
            records=tuple(records),
            draft=draft,
        )
        with replacing(out / EXPERTS_MANIFEST) as file:
            file.write(manifest.to_json().encode())
        copy_rest(checkpoint.path, out)
    except OSError as error:
        raise SpeqError(
            f"{out} cannot be written: {error.strerror}; what was packed is kept, the same command "
            "goes on from there"
        ) from error
    return manifest


def check_room(checkpoint: Checkpoint, names: ExpertNames, experts_bytes: int, out: Path) -> None:
    """Raise SpeqError where the disk has no room for experts and all else."""
    tensors = checkpoint.tensors.items()
    others = sum(info.nbytes for name, (_, info) in tensors if not names.is_expert(name))
    needed = experts_bytes + others
    free = shutil.disk_usage(out).free
    if needed > free:
        raise SpeqError(
            f"packing takes {format_bytes(needed)} and {format_bytes(free)} of disk are left at "
            f"{out}; free some, or pack to another disk"
        )


def write_non_experts(checkpoint: Checkpoint, names: ExpertNames, out: Path) -> None:
    """Shards with what is left of them, under their old names, and an index of it."""
    weight_map: dict[str, str] = {}
    total = 0
    for file_name, file in checkpoint.files.items():
        tensors = {
            name: info
            for name, (holder, info) in checkpoint.tensors.items()
            if holder is file and not names.is_expert(name)
        }
        if not tensors:
            continue
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(info.nbytes for info in tensors.values())
        if not (out / file_name).exists():
            with replacing(out / file_name) as target:
                copy_tensors(file, tensors, target)
    if list(checkpoint.files) == [SINGLE]:
        return
    with replacing(out / INDEX) as target:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        target.write(json.dumps(index, indent=1).encode() + b"\n")


def copy_tensors(source: SafetensorsFile, tensors: dict[str, TensorInfo], out: BinaryIO) -> None:
    """A safetensors file of some of another's tensors, in their order, some bytes at a time."""
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    entries = {name: (info.dtype, info.shape) for name, info in in_order}
    out.write(header_of(entries, source.metadata))
    buffer = torch.empty(COPY_BYTES, dtype=torch.uint8)
    for _, info in in_order:
        for at in range(0, info.nbytes, COPY_BYTES):
            part = buffer[: min(COPY_BYTES, info.nbytes - at)]
            source.read_into(info.offset + at, part)
            out.write(bytes_of(part))


def copy_rest(source: Path, out: Path) -> None:
    """What lies beside the weights, config.json last; then the journal goes."""
    ours = {"config.json", INDEX}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in ours:
            with whole(out / file.name) as target:
                target.write(file.read_bytes())
    with whole(out / "config.json") as target:
        target.write((source / "config.json").read_bytes())
    (out / EXPERTS_JOURNAL).unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """`replacing`, with the folder's own entry on the disk as well."""
    with replacing(path) as file:
        yield file
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
