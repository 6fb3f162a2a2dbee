"""Checksums (CRC-32) of a packed model's files and tensors, except experts, and their verification.

Files are verified when the folder is opened, tensors when they are loaded. For bytes that are read
anyway this costs only the CRC, about a second for each 1 to 3 GB, and the memory of a block.
"""

import json
import logging
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from speq.errors import FileError
from speq.files.range_file import RangeFile, bytes_of
from speq.files.regular_file import read_bytes
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.units import Done, format_bytes

logger = logging.getLogger("speq")

# Bytes read at a time for verification only.
BLOCK_BYTES = 1 << 20
PACK_AGAIN = "pack the model again, and check the disk"
Tensors = dict[str, tuple[SafetensorsFile, TensorInfo]]


class Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


class SummedFile:
    """Writer to a file. crc32: of everything written."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


@dataclass(slots=True)
class Checksums:
    """Checksums of a pack without its experts, by name.

    files    whole ones: configs, tokenizer, index
    headers  of safetensors files
    tensors  their bytes
    """

    files: dict[str, int] = field(default_factory=dict)
    headers: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    def entry(self) -> dict[str, dict[str, int]]:
        return {"files": self.files, "headers": self.headers, "tensors": self.tensors}

    @classmethod
    def of(cls, entry: Any) -> "Checksums":
        """Parse a manifest's entry. Raises KeyError, TypeError or ValueError if it is damaged."""
        found = [entry[name] for name in ("files", "headers", "tensors")]
        for sums in found:
            if not isinstance(sums, dict) or not all(type(crc) is int for crc in sums.values()):
                raise ValueError("checksums must be numbers by name")
        return cls(*found)

    def check_files(self, folder: Path) -> None:
        """Raise SpeqError unless every file is unchanged."""
        for name, crc32 in self.files.items():
            if zlib.crc32(read_bytes(folder / name, PACK_AGAIN)) != crc32:
                raise FileError(f"{folder / name} is not what was packed; {PACK_AGAIN}")

    def check_headers(self, files: dict[str, SafetensorsFile]) -> None:
        """Raise SpeqError unless the headers of a folder's open files, by name, are unchanged."""
        for name, file in files.items():
            if zlib.crc32(file.header) != self.headers.get(name):
                raise FileError(f"the header of {file.path} is not what was packed; {PACK_AGAIN}")


class TensorCheck:
    """Verification of each tensor of a pack once, as it is read or by reading it."""

    def __init__(self, tensors: Tensors, checksums: Checksums) -> None:
        self._wanted = checksums.tensors
        self._left = {
            (file.path, info.offset): (name, file, info)
            for name, (file, info) in tensors.items()
            if info.nbytes and checksums.tensors
        }
        self._done_bytes = 0

    def compare(self, file: RangeFile, offset: int, data: memoryview) -> None:
        """Raise SpeqError if these bytes are a tensor that has changed."""
        name, holder, info = self._left.get((file.path, offset), (None, None, None))
        if name is None or holder is None or info is None or info.nbytes != len(data):
            return
        del self._left[file.path, offset]
        self._judge(name, holder, zlib.crc32(data), info.nbytes)

    def leave(self, file: RangeFile, offset: int) -> None:
        """Exclude the tensor at this offset: the run does not use it."""
        self._left.pop((file.path, offset), None)

    def finish(self, progress: Done | None = None) -> None:
        """Read and verify the remaining tensors. progress: called with (tensors done, tensors)."""
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
            raise FileError(f"{file.path}: tensor {name} is not what was packed; {PACK_AGAIN}")
        self._done_bytes += nbytes


def check_crc32(path: Path, wanted: Any) -> None:
    """Raise SpeqError unless a file exists and has this CRC-32."""
    crc32, block = 0, torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with RangeFile(path) as file:
        for at in range(0, file.size, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, file.size - at)]
            file.read_into(at, part)
            crc32 = zlib.crc32(bytes_of(part), crc32)
    if crc32 != wanted:
        raise FileError(f"{path} is not what was written")


def seal(entries: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum to a manifest's entries."""
    return entries | {"crc32": zlib.crc32(json.dumps(entries).encode())}


def check_seal(path: Path, entries: dict[str, Any]) -> None:
    """Raise SpeqError if the manifest at `path` has changed.

    A manifest with only its experts' checksums is of an earlier version, and passes.
    """
    if "crc32" not in entries and "checksums" not in entries:
        return
    written = {name: value for name, value in entries.items() if name != "crc32"}
    if seal(written)["crc32"] != entries.get("crc32"):
        raise FileError(f"{path} is damaged: it is not what was packed; {PACK_AGAIN}")


@cache
def warn_unchecked(folder: Path) -> None:
    """Log that a pack of an earlier version is not fully checked, once per pack."""
    logger.warning(
        "%s was packed without checksums of anything but experts: its other weights and files are "
        "not checked; packing the model again adds them",
        folder,
    )
