"""Writes a packed model: its experts as records, all else as it was.

A folder becomes a model with its last file, config.json. Whatever is interrupted before that leaves
a folder that no run opens, and that the same command goes on with (`record_writer`).
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

from speq.errors import SpeqError
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.packed_dense import DENSE_FILE, names_in, write_dense
from speq.experts.packed_draft import DRAFT_FILE
from speq.experts.packed_store import RECORDS_FILE, Manifest, dtype_name
from speq.experts.record_writer import Packing, write_records
from speq.files.alignment import aligned
from speq.files.alone import alone_in
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
    """Write `out`, or finish what an earlier run began there.

    packing   what experts and other matrices become; None: raw records of experts
    progress  told (what, done, total)

    Raises SpeqError where the folder is taken, the disk is full or cannot be written.
    """
    packing = packing or Packing(store.codec)
    codec = packing.codec
    make_folder(out)
    another = f"another process packs to {out}; wait for its end, or give another folder"
    remedy = "what was packed is kept, the same command goes on from there"
    with alone_in(out, another), writing(out, remedy):
        # Asked by whoever is alone: the one before may have made a model of it.
        begun = (out / EXPERTS_JOURNAL).exists()
        if (out / "config.json").exists() and not begun:
            raise SpeqError(f"{out} is a model already; give a folder that is not there yet")
        remove_abandoned(out)
        if not begun and any(out.iterdir()):
            raise SpeqError(
                f"{out} exists and holds other files; give a folder that is not there yet"
            )
        source, before = checkpoint.fingerprint(), stamp(checkpoint)
        ours = written_names(checkpoint)
        if packing.beside is not None:
            ours.add(packing.beside.parts[0])
        journal = Journal(out / EXPERTS_JOURNAL, packing.named(source), ours.__contains__)
        packing.check_header(journal.header, source, out)
        left = max(store.num_layers * store.num_experts - len(journal.entries), 0)
        dense = names_in(checkpoint, packing.dense)
        dense_bytes = sum(aligned(checkpoint.tensors[name][1].nbytes) for name in dense)
        beside = None if packing.beside is None else checkpoint.path / packing.beside
        copied = copied_files(checkpoint.path) + ([] if beside is None else files_in(beside))
        copied_bytes = sum(each.stat().st_size for each in copied)
        records_bytes = packing.most_bytes(left)
        check_room(checkpoint, store.names, records_bytes + dense_bytes + copied_bytes, out)
        threads = torch.get_num_threads()
        experts = partial(progress, "packing experts")
        written, draft = write_records(store, packing, out, journal, before, experts, threads)
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
        )
        manifest.check(out / EXPERTS_MANIFEST)
        check_unchanged(checkpoint, before)
        with replacing(out / EXPERTS_MANIFEST) as file:
            file.write(manifest.to_json().encode())
        if packing.beside is not None and beside is not None:
            copy_draft(beside, out / packing.beside, progress)
        copy_rest(checkpoint.path, out)
    return manifest


def check_room(checkpoint: Checkpoint, names: ExpertNames, records_bytes: int, out: Path) -> None:
    """Raise SpeqError where the disk has no room for records and all else."""
    tensors = checkpoint.tensors.items()
    others = sum(info.nbytes for name, (_, info) in tensors if not names.is_expert(name))
    needed = records_bytes + others
    free = shutil.disk_usage(out).free
    if needed > free:
        raise SpeqError(
            f"packing takes {format_bytes(needed)} and {format_bytes(free)} of disk are left at "
            f"{out}; free some, or pack to another disk"
        )


def written_names(checkpoint: Checkpoint) -> set[str]:
    """Names of the files that packing writes before config.json, which makes the folder a model."""
    names = {EXPERTS_JOURNAL, EXPERTS_MANIFEST, RECORDS_FILE, DRAFT_FILE, DENSE_FILE, INDEX}
    return names | set(checkpoint.files) | {each.name for each in copied_files(checkpoint.path)}


def write_non_experts(
    checkpoint: Checkpoint, names: ExpertNames, out: Path, progress: Progress = no_progress
) -> Checksums:
    """Shards with what is left of them, under their old names, and an index of it.

    They are written whether or not an earlier run did: they are a small part of all.
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
    """A safetensors file of some of another's tensors, in their order, some bytes at a time, under
    their names there.

    Returns its header and the CRC-32 of each tensor.
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
    """Files beside the weights that a run reads, and that checksums are kept of."""
    names = ["config.json", *(each.name for each in copied_files(source))]
    return sorted(name for name in names if any(fnmatch(name, p) for p in HUB_PATTERNS))


def files_in(folder: Path) -> list[Path]:
    """The files of a model's folder, config.json, which makes it one, last."""
    files = (each for each in folder.iterdir() if each.is_file())
    return sorted(files, key=lambda each: (each.name == "config.json", each.name))


def copy_draft(source: Path, out: Path, progress: Progress = no_progress) -> None:
    """A draft's checkpoint, as it is."""
    out.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    files = files_in(source)
    for each in track("copying the draft", files, len(files), progress):
        copy_whole(each, out / each.name)


def copy_rest(source: Path, out: Path) -> None:
    """What goes with the weights, config.json last; then the journal goes."""
    for each in [*copied_files(source), source / "config.json"]:
        copy_whole(each, out / each.name)
    (out / EXPERTS_JOURNAL).unlink(missing_ok=True)


def copy_whole(source: Path, out: Path) -> None:
    """A file as it is, whole or not at all."""
    with whole(out) as target, source.open("rb") as file:
        shutil.copyfileobj(file, target, COPY_BYTES)


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
