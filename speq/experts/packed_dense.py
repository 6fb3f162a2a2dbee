"""Losslessly packed dense matrices of a packed model.

dense.bin  the packed matrices, in the order of the manifest, each at a multiple of 4,096 bytes

Their plain weights stay in the safetensors shards, for runs in another form or dtype, for drafts
and for transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError
from speq.experts.packed_store import Record, end_of
from speq.experts.passes import map_in_order
from speq.files.alignment import align, allocate_aligned, prefer_huge_pages
from speq.files.atomic_file import replacing
from speq.files.checkpoint import Checkpoint
from speq.files.checksums import PACK_AGAIN
from speq.files.range_file import ENDS_BYTES, RangeFile, bytes_of
from speq.files.safetensors_file import TensorInfo
from speq.kernels import dense_ops
from speq.kernels.checksum import crc32_of
from speq.kernels.compact_layout import CompactLayout
from speq.units import Progress, no_progress, track

DENSE_FILE = "dense.bin"


def smaller_record(words: Tensor) -> Tensor | None:
    """Pack a matrix [N, K] bfloat16 on the host losslessly into [R] uint8; None if that is not
    smaller.
    """
    record = dense_ops.encode_dense(words, prepare=prefer_huge_pages)
    return record if record.nbytes < words.nbytes else None


def can_pack(info: TensorInfo) -> bool:
    return info.dtype == torch.bfloat16 and len(info.shape) == 2


def names_in(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Filter a checkpoint's tensors to those that can be packed."""
    tensors = checkpoint.tensors
    return [name for name in names if name in tensors and can_pack(tensors[name][1])]


def write_dense(
    checkpoint: Checkpoint,
    names: Sequence[str],
    out: Path,
    threads: int,
    progress: Progress = no_progress,
) -> dict[str, Record | None]:
    """Write dense.bin with the named tensors, packed. Return their records by name.

    It is written even if an earlier run did: it is a small part of the model.
    """
    records: dict[str, Record | None] = {}
    end = 0

    def encoded(at: int) -> Tensor | None:
        return smaller_record(checkpoint.tensors[names[at]][0].tensor(names[at]))

    making = map_in_order(encoded, range(len(names)), threads)
    with replacing(out / DENSE_FILE) as file, closing(making):
        pairs = zip(names, making, strict=True)
        for name, record in track("packing dense layers", pairs, len(names), progress):
            records[name] = None
            if record is not None:
                records[name] = Record(end, record.nbytes, crc32_of(record))
                end = align(end + record.nbytes)
                file.write(bytes_of(record))
                file.write(bytes(end - file.tell()))
    return records


class PackedDense:
    """Thread-safe reader of dense.bin that verifies checksums.

    Raises SpeqError if the file or the manifest does not match the checkpoint's tensors.
    """

    def __init__(self, checkpoint: Checkpoint, records: Mapping[str, Record | None]) -> None:
        self._records = records
        for name, record in records.items():
            _check(checkpoint, name, record)
        self._file = RangeFile(checkpoint.path / DENSE_FILE)
        end = end_of(record for record in records.values() if record is not None)
        if self._file.size != end:
            self._file.close()
            raise FileError(
                f"{self._file.path} has {self._file.size} bytes and its manifest says {end}; pack "
                "the model again"
            )

    def __contains__(self, name: str | None) -> bool:
        """True if packing a tensor was tried."""
        return name in self._records

    def nbytes(self, name: str, words_bytes: int) -> int | None:
        """Bytes of a matrix: packed, or else `words_bytes`; None: it is not here."""
        if name not in self._records:
            return None
        record = self._records[name]
        return words_bytes if record is None else record.nbytes

    def read(self, name: str) -> Tensor | None:
        """Read a packed matrix, [R] uint8; None if plain weights are no larger.

        Raises SpeqError if it is damaged.
        """
        wanted = self._records[name]
        if wanted is None:
            return None
        record = torch.empty(wanted.nbytes, dtype=torch.uint8)
        self._file.read_scattered(wanted.offset, record, allocate_aligned(1, ENDS_BYTES)[0])
        if crc32_of(record) != wanted.crc32:
            raise FileError(
                f"{self._file.path}: the record of {name}, {wanted.nbytes} bytes at "
                f"{wanted.offset}, is not what was packed; {PACK_AGAIN}"
            )
        return record

    def compare(self) -> int:
        """Verify all packed matrices; return their number. Raises SpeqError for the first damaged
        one.
        """
        return sum(self.read(name) is not None for name in self._records)

    def close(self) -> None:
        self._file.close()


def _check(checkpoint: Checkpoint, name: str, record: Record | None) -> None:
    """Raise SpeqError for a record that cannot be of the named tensor."""
    _, info = checkpoint.tensors.get(name, (None, None))
    if info is None or not can_pack(info):
        raise FileError(
            f"{checkpoint.path} has a record of {name}, not a bfloat16 matrix of its shards; "
            "pack the model again"
        )
    fewest = CompactLayout.of_matrix(info.shape, lossless=True).fixed_bytes
    if record is not None and not fewest <= record.nbytes < info.nbytes:
        raise FileError(
            f"{checkpoint.path} has a record of {record.nbytes} bytes of {name}; one of a matrix "
            f"{list(info.shape)} has {fewest} or more, and fewer than its {info.nbytes} unpacked: "
            "pack the model again"
        )
