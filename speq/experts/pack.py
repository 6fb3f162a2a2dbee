"""Packing of a model: experts are packed, everything else is copied.

A folder becomes a model with its last file, config.json. An interruption before that leaves a
folder that no run opens and that the same command continues (`record_writer`).
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from speq.errors import FileError, NoRoom
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.packed_dense import DENSE_FILE, names_in, write_dense
from speq.experts.packed_draft import DRAFT_FILE
from speq.experts.packed_store import RECORDS_FILE, Manifest, dtype_name
from speq.experts.record_writer import RESUMES, Packing, write_records
from speq.experts.striped_records import WHOLE, Stripe, check_empty, measured_rates, share_of
from speq.files.alignment import align
from speq.files.alone import lock_folder
from speq.files.atomic_file import make_folder, remove_abandoned, replacing, writing
from speq.files.checkpoint import (
    EXPERTS_JOURNAL,
    EXPERTS_MANIFEST,
    HUB_PATTERNS,
    INDEX,
    SINGLE,
    Checkpoint,
)
from speq.files.checksums import Checksums, SummedFile
from speq.files.contents import check_unchanged, stamp
from speq.files.copied_files import copied_files
from speq.files.journal import Journal
from speq.files.range_file import bytes_of
from speq.files.safetensors_file import LENGTH_BYTES, SafetensorsFile, TensorInfo, header_of
from speq.units import Progress, format_bytes, no_progress, track

COPY_BYTES = 16 << 20


def pack(
    checkpoint: Checkpoint,
    store: SafetensorsExpertStore,
    out: Path,
    packing: Packing | None = None,
    progress: Progress = no_progress,
) -> Manifest:
    """Write a packed model to `out`, or continue an earlier run there.

    packing   codecs of experts and dense matrices; None: plain weights
    progress  called with (what, done, total)

    Raises SpeqError if the folder is in use, or the disk is full or cannot be written.
    """
    packing = packing or Packing(store.codec)
    codec = packing.codec
    make_folder(out)
    another = f"another process packs to {out}; wait for its end, or give another folder"
    with lock_folder(out, another), writing(out, RESUMES):
        # Checked under the lock: another process may have completed the model.
        begun = (out / EXPERTS_JOURNAL).exists()
        if (out / "config.json").exists() and not begun:
            raise FileError(f"{out} is a model already; give a folder that is not there yet")
        remove_abandoned(out)
        if not begun and any(out.iterdir()):
            raise FileError(
                f"{out} exists and holds other files; give a folder that is not there yet"
            )
        if packing.stripe is not None:
            if packing.stripe.resolve() == out.resolve():
                raise FileError(f"{out} is the pack's own folder; give one on another disk")
            if not begun:
                check_empty(packing.stripe)
        source, before = checkpoint.fingerprint(), stamp(checkpoint)
        ours = written_names(checkpoint)
        if packing.draft_folder is not None:
            ours.add(packing.draft_folder.parts[0])
        journal = Journal(out / EXPERTS_JOURNAL, packing.header(source), ours.__contains__)
        packing.check_header(journal.header, source, out)
        left = max(store.num_layers * store.num_experts - len(journal.entries), 0)
        stripe, share = None, 0
        if packing.stripe is not None:
            stripe = Stripe.of(journal.header["stripe"])
            stripe.claim(begun=bool(journal.entries))
            record_bytes = left * align(codec.shape.nbytes)
            share = share_of(measured_rates([out, stripe.folder], record_bytes))
        dense = names_in(checkpoint, packing.dense)
        dense_bytes = sum(align(checkpoint.tensors[name][1].nbytes) for name in dense)
        folder = packing.draft_folder
        draft_path = None if folder is None else checkpoint.path / folder
        draft_files = [] if draft_path is None else files_in(draft_path)
        copied = copied_files(checkpoint.path) + draft_files
        copied_bytes = sum(each.stat().st_size for each in copied)
        records_bytes = packing.most_bytes(left)
        if stripe is not None:
            there = record_bytes * share // WHOLE
            check_room(there, stripe.folder)
            records_bytes -= there
        tensors = checkpoint.tensors.items()
        others = sum(info.nbytes for name, (_, info) in tensors if not store.names.is_expert(name))
        check_room(records_bytes + others + dense_bytes + copied_bytes, out)
        threads = torch.get_num_threads()
        experts = partial(progress, "packing experts")
        written, draft = write_records(
            store, packing, out, journal, before, experts, threads, share
        )
        dense_records = write_dense(checkpoint, dense, out, threads, progress) if dense else {}
        checksums = write_non_experts(checkpoint, store.names, out, progress)
        for name in read_names(checkpoint.path):
            checksums.files[name] = zlib.crc32((checkpoint.path / name).read_bytes())
        manifest = Manifest(
            codec=codec.name,
            dtype=dtype_name(codec.shape.dtype),
            hidden_size=codec.shape.hidden_size,
            expert_width=codec.shape.expert_width,
            num_layers=store.num_layers,
            num_experts=store.num_experts,
            source=source,
            records=tuple(written.records),
            draft=draft,
            checksums=checksums,
            dense=dense_records,
            groups=codec.shape.groups,
            divides=codec.shape.divides,
            blocks=codec.shape.blocks,
            gated=codec.shape.gated,
            stripe=stripe,
        )
        manifest.check(out / EXPERTS_MANIFEST)
        check_unchanged(checkpoint, before)
        with replacing(out / EXPERTS_MANIFEST) as file:
            file.write(manifest.to_json().encode())
        if folder is not None and draft_path is not None:
            copy_draft(draft_path, out / folder, progress)
        copy_rest(checkpoint.path, out)
    return manifest


def packed_from(checkpoint: Checkpoint, codec: str, out: Path) -> Manifest | None:
    """The manifest of a whole pack of this very model in `out`, by that codec; None if there is
    none.
    """
    manifest = out / EXPERTS_MANIFEST
    if not manifest.exists() or not (out / "config.json").exists():
        return None
    if (out / EXPERTS_JOURNAL).exists():
        return None
    found = Manifest.of(manifest)
    return found if (found.codec, found.source) == (codec, checkpoint.fingerprint()) else None


def check_room(needed: int, out: Path) -> None:
    """Raise SpeqError if the disk has too little room for what is packed to it."""
    free = shutil.disk_usage(out).free
    if needed > free:
        raise NoRoom(
            f"packing takes {format_bytes(needed)} and {format_bytes(free)} of disk are left at "
            f"{out}; free some, or pack to another disk"
        )


def written_names(checkpoint: Checkpoint) -> set[str]:
    """Names of the files that packing writes before config.json."""
    names = {EXPERTS_JOURNAL, EXPERTS_MANIFEST, RECORDS_FILE, DRAFT_FILE, DENSE_FILE, INDEX}
    return names | set(checkpoint.files) | {each.name for each in copied_files(checkpoint.path)}


def write_non_experts(
    checkpoint: Checkpoint, names: ExpertNames, out: Path, progress: Progress = no_progress
) -> Checksums:
    """Write the shards without their experts, under their old names, and an index.

    They are written even if an earlier run did: they are a small part of the model.
    """
    checksums = Checksums()
    weight_map: dict[str, str] = {}
    total = 0
    files = checkpoint.files.items()
    for file_name, file in track("copying other weights", files, len(files), progress):
        tensors = {
            name: info
            for name, (holder, info) in checkpoint.tensors.items()
            if holder is file and not names.is_expert(name)
        }
        if not tensors:
            continue
        weight_map |= dict.fromkeys((file.stored[name] for name in tensors), file_name)
        total += sum(info.nbytes for info in tensors.values())
        with replacing(out / file_name) as target:
            header, crc32s = copy_tensors(file, tensors, target)
        checksums.headers[file_name] = zlib.crc32(header)
        checksums.tensors |= crc32s
    if list(checkpoint.files) == [SINGLE]:
        return checksums
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    content = json.dumps(index, indent=1).encode() + b"\n"
    checksums.files[INDEX] = zlib.crc32(content)
    with replacing(out / INDEX) as target:
        target.write(content)
    return checksums


def copy_tensors(
    source: SafetensorsFile, tensors: dict[str, TensorInfo], out: BinaryIO
) -> tuple[bytes, dict[str, int]]:
    """Copy some tensors of a safetensors file to another, in order and piece by piece, by name.

    Returns the new header and the CRC-32 of each tensor.
    """
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    entries = {source.stored[name]: (info.dtype, info.shape) for name, info in in_order}
    header = header_of(entries, source.metadata)
    out.write(header)
    buffer = torch.empty(COPY_BYTES, dtype=torch.uint8)
    crc32s: dict[str, int] = {}
    for name, info in in_order:
        summed = SummedFile(out)
        for at in range(0, info.nbytes, COPY_BYTES):
            part = buffer[: min(COPY_BYTES, info.nbytes - at)]
            source.read_into(info.offset + at, part)
            summed.write(bytes_of(part))
        crc32s[name] = summed.crc32
    return header[LENGTH_BYTES:], crc32s


def read_names(source: Path) -> list[str]:
    """Names of the other files that a run reads, whose checksums are kept."""
    names = ["config.json", *(each.name for each in copied_files(source))]
    return sorted(name for name in names if any(fnmatch(name, p) for p in HUB_PATTERNS))


def files_in(folder: Path) -> list[Path]:
    """Files of a model's folder, config.json last."""
    files = (each for each in folder.iterdir() if each.is_file())
    return sorted(files, key=lambda each: (each.name == "config.json", each.name))


def copy_draft(source: Path, out: Path, progress: Progress = no_progress) -> None:
    out.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    files = files_in(source)
    for each in track("copying the draft", files, len(files), progress):
        copy_whole(each, out / each.name)


def copy_rest(source: Path, out: Path) -> None:
    """Copy the other files, config.json last; then remove the journal."""
    for each in [*copied_files(source), source / "config.json"]:
        copy_whole(each, out / each.name)
    (out / EXPERTS_JOURNAL).unlink(missing_ok=True)


def copy_whole(source: Path, out: Path) -> None:
    """Copy a file atomically."""
    with replace_synced(out) as target, source.open("rb") as file:
        shutil.copyfileobj(file, target, COPY_BYTES)


@contextmanager
def replace_synced(path: Path) -> Iterator[BinaryIO]:
    """Open a file as `replacing` does, and sync its folder as well."""
    with replacing(path) as file:
        yield file
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
