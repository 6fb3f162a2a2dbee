"""Checksums (CRC-32) of a packed model's files and tensors, experts apart, and their comparison.

Files are compared when the folder is opened, tensors when they are loaded: bytes that were read
anyway cost the time of a CRC, about a second for each 1 to 3 GB, and no memory but a block.
"""

import json
import logging
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from speq.errors import SpeqError
from speq.files.range_file import RangeFile, bytes_of
from speq.files.regular_file import read_bytes
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.units import Done, format_bytes

logger = logging.getLogger("speq")

# Read at a time of what is only compared.
BLOCK_BYTES = 1 << 20
PACK_AGAIN = "pack the model again, and look after the disk"
Tensors = dict[str, tuple[SafetensorsFile, TensorInfo]]


class Sink(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class SummedFile:
    """Writes to a file. crc32: of all that was written."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


@dataclass(slots=True)
class Checksums:
    """Of a pack but its experts, each by name.

    files    whole ones: configs, tokenizer, index
    headers  of safetensors files
    tensors  their bytes
    """

    files: dict[str, int] = field(default_factory=dict)
    headers: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    def entry(self) -> dict[str, dict[str, int]]:
        """What a manifest says of them."""
        return {"files": self.files, "headers": self.headers, "tensors": self.tensors}

    @classmethod
    def of(cls, entry: Any) -> "Checksums":
        """Of a manifest's entry. Raises KeyError, TypeError or ValueError where it is damaged."""
        found = [entry[name] for name in ("files", "headers", "tensors")]
        for sums in found:
            if not isinstance(sums, dict) or not all(type(crc) is int for crc in sums.values()):
                raise ValueError("checksums that are no numbers by name")
        return cls(*found)

    def check_files(self, folder: Path) -> None:
        """Raise SpeqError unless every file is what was packed."""
        for name, crc32 in self.files.items():
            if zlib.crc32(read_bytes(folder / name, PACK_AGAIN)) != crc32:
                raise SpeqError(f"{folder / name} is not what was packed; {PACK_AGAIN}")

    def check_headers(self, files: dict[str, SafetensorsFile]) -> None:
        """The same of the headers of a folder's open files, by name."""
        for name, file in files.items():
            if zlib.crc32(file.header) != self.headers.get(name):
                raise SpeqError(f"the header of {file.path} is not what was packed; {PACK_AGAIN}")


class TensorCheck:
    """Compares each tensor of a pack once, with what was read of it or by reading it."""

    def __init__(self, tensors: Tensors, checksums: Checksums) -> None:
        self._wanted = checksums.tensors
        self._left = {
            (file.path, info.offset): (name, file, info)
            for name, (file, info) in tensors.items()
            if info.nbytes and checksums.tensors
        }
        self._done_bytes = 0

    def compare(self, file: RangeFile, offset: int, data: memoryview) -> None:
        """Raise SpeqError where these bytes are a tensor and not what was packed."""
        name, holder, info = self._left.get((file.path, offset), (None, None, None))
        if name is None or holder is None or info is None or info.nbytes != len(data):
            return
        del self._left[file.path, offset]
        self._judge(name, holder, zlib.crc32(data), info.nbytes)

    def leave(self, file: RangeFile, offset: int) -> None:
        """Compare no tensor that lies there: a run has no use for it."""
        self._left.pop((file.path, offset), None)

    def finish(self, progress: Done | None = None) -> None:
        """Read and compare what was not yet. progress: told (tensors, of all those)."""
        buffer, left = torch.empty(BLOCK_BYTES, dtype=torch.uint8), len(self._left)
        for done, (name, file, info) in enumerate(self._left.values()):
            if progress is not None:
                progress(done, left)
            crc32 = 0
            for at in range(0, info.nbytes, BLOCK_BYTES):
                part = buffer[: min(BLOCK_BYTES, info.nbytes - at)]
                file.read_into(info.offset + at, part)
                crc32 = zlib.crc32(bytes_of(part), crc32)
            self._judge(name, file, crc32, info.nbytes)
        self._left.clear()
        if progress is not None and left:
            progress(left, left)
        if self._done_bytes:
            logger.info("%s of weights are what was packed", format_bytes(self._done_bytes))

    def _judge(self, name: str, file: RangeFile, crc32: int, nbytes: int) -> None:
        if crc32 != self._wanted.get(name):
            raise SpeqError(f"{file.path}: tensor {name} is not what was packed; {PACK_AGAIN}")
        self._done_bytes += nbytes


def check_crc32(path: Path, wanted: Any) -> None:
    """Raise SpeqError unless a file is there and has this CRC-32."""
    crc32, block = 0, torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with RangeFile(path) as file:
        for at in range(0, file.size, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, file.size - at)]
            file.read_into(at, part)
            crc32 = zlib.crc32(bytes_of(part), crc32)
    if crc32 != wanted:
        raise SpeqError(f"{path} is not what was written")


def sealed(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a manifest with a checksum of their own."""
    return entries | {"crc32": zlib.crc32(json.dumps(entries).encode())}


def check_seal(path: Path, entries: dict[str, Any]) -> None:
    """Raise SpeqError where the manifest at `path` is not what was written.

    One that says nothing of checksums but its experts' is of an earlier version, and passes.
    """
    if "crc32" not in entries and "checksums" not in entries:
        return
    written = {name: value for name, value in entries.items() if name != "crc32"}
    if sealed(written)["crc32"] != entries.get("crc32"):
        raise SpeqError(f"{path} is damaged: it is not what was packed; {PACK_AGAIN}")


@cache
def say_unchecked(folder: Path) -> None:
    """Once for each pack of an earlier version."""
    logger.warning(
        "%s was packed without checksums of anything but experts: its other weights and files are "
        "not checked; packing the model again adds them",
        folder,
    )
