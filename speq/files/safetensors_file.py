"""One safetensors file, read by ranges. Its header is checked before it is used.

Format: https://huggingface.co/docs/safetensors#format. A little-endian uint64 gives the length of a
JSON header, which gives each tensor's dtype, shape and byte range in the data that follows. Ranges
are read with `pread`, and the pages are dropped again, so a file is neither mapped nor cached by
the operating system.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from speq.errors import CheckpointError, SpeqError, UnsupportedError
from speq.files.json_file import parse_json
from speq.files.range_file import RangeFile, read_at
from speq.files.regular_file import check_own

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8  # of the header's length, which a file begins with
MAX_HEADER_BYTES = 100_000_000  # the limit the safetensors library sets
# Remedy for sound files that do not match each other.
OTHER_VERSION = "one of them belongs to another model or version: download the whole model again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype, shape and place of a tensor. offset counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(RangeFile):
    """An open file: `tensors` by name, `metadata`, and `read_into` for byte ranges.

    called  maps a tensor's name on disk to its name here; None: the same
    stored  names on disk, by the names of `tensors`

    Raises SpeqError, naming the file, if it is missing, unreadable, truncated or inconsistent.
    """

    def __init__(self, path: Path, called: Callable[[str], str] | None = None) -> None:
        self._called = called
        super().__init__(path)

    def _check(self) -> None:
        self.header = self._read_header()
        self.metadata, tensors = self._parse(self.header)
        self.stored = {
            name if self._called is None else self._called(name): name for name in tensors
        }
        self.tensors = {name: tensors[stored] for name, stored in self.stored.items()}
        if len(self.tensors) < len(tensors):
            twice = sorted(tensors.keys() - self.stored.values())[0]
            raise CheckpointError(
                f"{self.path} holds tensor {twice} under two names; download it again"
            )

    def tensor(self, name: str) -> Tensor:
        info = self.tensors[name]
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        self.read_into(info.offset, data)
        return data.view(info.dtype).view(info.shape)

    def _read_header(self) -> bytes:
        prefix = read_at(self._fd, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(self.size - 8, MAX_HEADER_BYTES):
            check_own(self.path, read_at(self._fd, 80, 0))
            raise CheckpointError(
                f"{self.path} is not a complete safetensors file: its header should take {length} "
                f"bytes and the file has {self.size}; download it again"
            )
        return read_at(self._fd, length, 8)

    def _parse(self, header: bytes) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        try:
            entries = parse_json(header)
        except ValueError as error:
            raise self._corrupt(f"it is not valid JSON: {error}") from error
        if not isinstance(entries, dict):
            raise self._corrupt(f"it is a JSON {type(entries).__name__} and must be an object")
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise self._corrupt(f"__metadata__ is a {type(metadata).__name__}, not an object")
        start = 8 + len(header)
        tensors = {name: self._tensor_info(name, entry, start) for name, entry in entries.items()}
        self._check_ranges(tensors, start)
        return metadata, tensors

    def _tensor_info(self, name: str, entry: Any, start: int) -> TensorInfo:
        if not isinstance(entry, dict):
            raise self._corrupt(f"tensor {name} is a {type(entry).__name__}, not an object")
        dtype_name, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has dtype {dtype_name}, which is not supported; "
                f"supported are {', '.join(DTYPES)}: download it again, or convert it"
            )
        if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
            raise self._corrupt(
                f"tensor {name} has shape {shape} and data_offsets {offsets}, which must be lists "
                "of whole numbers, the second of two"
            )
        dtype = DTYPES[dtype_name]
        begin, end = offsets
        nbytes = math.prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise self._corrupt(
                f"tensor {name} of shape {shape} needs {nbytes} bytes but is given the range "
                f"{begin} to {end}"
            )
        if start + end > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {start + end} and the file "
                f"has {self.size}; download it again"
            )
        return TensorInfo(dtype, tuple(shape), start + begin, nbytes)

    def _check_ranges(self, tensors: dict[str, TensorInfo], start: int) -> None:
        """Check for overlaps and gaps, which the format does not allow."""
        at = start
        in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
        for name, info in in_order:
            if info.offset != at:
                raise self._corrupt(
                    f"tensor {name} begins at byte {info.offset} of the file and the one before it "
                    f"ends at {at}"
                )
            at += info.nbytes
        if at != self.size:
            raise self._corrupt(f"its tensors end at byte {at} and the file has {self.size}")

    def _corrupt(self, reason: str) -> SpeqError:
        return CheckpointError(
            f"{self.path} has a corrupt safetensors header: {reason}; download it again"
        )


def header_of(
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """Build the header of a file whose tensors follow in the order of `entries`, without gaps."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """True if a JSON value is a list of whole numbers that are not negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
