"""Detection of changed shards, for data that is derived from a checkpoint.

A stamp costs nothing and is valid as long as no shard is touched: real path, inode, size, and times
of the last change. A touched, moved or downloaded file may have the same bytes. Then a digest of
all bytes decides. It takes one read of the checkpoint and is cached with the stamps. Data that is
derived expert by expert compares experts instead.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from speq.errors import CheckpointError, SpeqError
from speq.files.atomic_file import write_whole
from speq.files.cache_folder import DIGESTS, cache_folder
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint
from speq.files.json_file import read_json
from speq.files.range_file import RangeFile, bytes_of
from speq.units import Done, format_bytes

logger = logging.getLogger("speq")

FORMAT = "speq-digests-1"
BLOCK_BYTES = 4 << 20
# One core computes SHA-256 about as fast as a disk reads; others hide the rest.
THREADS = 4


def stamp(checkpoint: Checkpoint) -> str:
    """Stamp that changes whenever a shard, or a pack's manifest, is written, replaced, moved or
    touched.

    It describes the open files, not later replacements.
    """
    entries: list[Any] = [[name, *file.stamp()] for name, file in sorted(checkpoint.files.items())]
    manifest = checkpoint.path / EXPERTS_MANIFEST
    if manifest.exists():
        entries.append(hashlib.sha256(manifest.read_bytes()).hexdigest())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def check_unchanged(checkpoint: Checkpoint, before: str) -> None:
    """Raise SpeqError if a shard was touched since its checkpoint had this stamp."""
    if stamp(checkpoint) != before:
        raise CheckpointError(
            f"the files of {checkpoint.path} were changed or replaced while they were read; run "
            "the same again, which compares what is there with them"
        )


def content_digest(checkpoint: Checkpoint, progress: Done | None = None) -> str:
    """Digest of all bytes of the shards, the same on every machine.

    A pack's manifest has all checksums, so nothing else of it is read. Other checkpoints are read
    as a whole, unless the digests of their shards are cached and their stamps unchanged.

    progress  called with (MiB done, MiB in all)
    """
    manifest = checkpoint.path / EXPERTS_MANIFEST
    more = manifest.read_bytes() if manifest.exists() else b""
    if checkpoint.checksums is not None:
        return hashlib.sha256(more).hexdigest()
    digest = hashlib.sha256(more)
    for name, found in sorted(_digests(checkpoint, progress).items()):
        digest.update(f"{name}:{found}:".encode())
    return digest.hexdigest()


def _digests(checkpoint: Checkpoint, progress: Done | None) -> dict[str, str]:
    """SHA-256 of each shard, by name."""
    path = _cache_path(checkpoint)
    stamps = {name: file.stamp() for name, file in checkpoint.files.items()}
    kept = _read_cached(path)
    found = {
        name: kept[name]["sha256"]
        for name in stamps
        if kept.get(name, {}).get("stamp") == stamps[name]
    }
    left = {name: file for name, file in checkpoint.files.items() if name not in found}
    if not left:
        return found
    total = sum(file.size for file in left.values())
    logger.info(
        "%s of %s are read once for a digest, which is kept", format_bytes(total), checkpoint.path
    )
    found |= _read(left, total, progress)
    if {name: file.stamp() for name, file in checkpoint.files.items()} != stamps:
        raise CheckpointError(
            f"the files of {checkpoint.path} were changed or replaced while they were read; run "
            "the same again"
        )
    if path is not None:
        shards = {name: {"stamp": stamps[name], "sha256": found[name]} for name in found}
        entries = {"format": FORMAT, "model": os.path.realpath(checkpoint.path), "shards": shards}
        with suppress(SpeqError):  # without a cache it is computed again
            write_whole(path, json.dumps(entries).encode())
    return found


def _read(files: Mapping[str, RangeFile], total: int, progress: Done | None) -> dict[str, str]:
    """Compute SHA-256 of whole files, several at a time."""
    done = 0

    def digest_of(file: RangeFile) -> str:
        nonlocal done
        digest, block = hashlib.sha256(), torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for at in range(0, file.size, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, file.size - at)]
            file.read_into(at, part)
            digest.update(bytes_of(part))
            done += part.nbytes  # a progress bar may miss a block
            if progress is not None:
                progress(min(done, total) >> 20, max(total >> 20, 1))
        return digest.hexdigest()

    with ThreadPoolExecutor(THREADS, "speq-digest") as pool:
        found = dict(zip(files, pool.map(digest_of, files.values()), strict=True))
    if progress is not None:
        progress(max(total >> 20, 1), max(total >> 20, 1))
    return found


def _cache_path(checkpoint: Checkpoint) -> Path | None:
    folder = cache_folder(DIGESTS)
    name = hashlib.sha256(os.path.realpath(checkpoint.path).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}.json"


def _read_cached(path: Path | None) -> dict[str, Any]:
    """Read cached entries of shards, by name; empty if the file is not one of ours."""
    if path is None or not os.path.exists(path):
        return {}
    with suppress(SpeqError):
        content = read_json(path)
        shards = content.get("shards")
        if content.get("format") != FORMAT:
            return {}
        if isinstance(shards, dict) and all(isinstance(each, dict) for each in shards.values()):
            return shards
    return {}
