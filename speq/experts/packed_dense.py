"""Matrices outside the experts in a packed model: their lossless records, which a run may hold.

dense.bin  the records, in the order of the manifest, each at a multiple of 4,096 bytes

The words of these matrices are in the safetensors shards all the same: runs in another form or
dtype, drafts and transformers read them there.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.experts.packed_store import Record, end_of
from speq.experts.passes import in_turn
from speq.files.alignment import aligned, aligned_bytes
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
    """The lossless record [R] uint8 of a matrix [N, K] bfloat16 of the host; None where it takes
    no less than the words.
    """
    record = dense_ops.encode_dense_lossless(words)
    return record if record.nbytes < words.nbytes else None


def recordable(info: TensorInfo) -> bool:
    """Whether a tensor is one that there are records of."""
    return info.dtype == torch.bfloat16 and len(info.shape) == 2


def names_in(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Those tensors of a checkpoint that there are records of."""
    tensors = checkpoint.tensors
    return [name for name in names if name in tensors and recordable(tensors[name][1])]


def write_dense(
    checkpoint: Checkpoint,
    names: Sequence[str],
    out: Path,
    threads: int,
    progress: Progress = no_progress,
) -> dict[str, Record | None]:
    """Write dense.bin: the records of the tensors of these names, by their names.

    It is written whether or not an earlier run did: it is a small part of all.
    """
    records: dict[str, Record | None] = {}
    end = 0

    def encoded(at: int) -> Tensor | None:
        return smaller_record(checkpoint.tensors[names[at]][0].tensor(names[at]))

    making = in_turn(encoded, range(len(names)), threads)
    with replacing(out / DENSE_FILE) as file, closing(making):
        pairs = zip(names, making, strict=True)
        for name, record in track("packing dense layers", pairs, len(names), progress):
            records[name] = None
            if record is not None:
                records[name] = Record(end, record.nbytes, crc32_of(record))
                end = aligned(end + record.nbytes)
                file.write(bytes_of(record))
                file.write(bytes(end - file.tell()))
    return records


class PackedDense:
    """Reads records of dense.bin, from any thread, and compares them with their checksums.

    Raises SpeqError where the file or the manifest is not of the checkpoint's tensors.
    """

    def __init__(self, checkpoint: Checkpoint, records: Mapping[str, Record | None]) -> None:
        self._records = records
        for name, record in records.items():
            _check(checkpoint, name, record)
        self._file = RangeFile(checkpoint.path / DENSE_FILE)
        end = end_of(record for record in records.values() if record is not None)
        if self._file.size != end:
            self._file.close()
            raise SpeqError(
                f"{self._file.path} has {self._file.size} bytes and its manifest says {end}; pack "
                "the model again"
            )

    def __contains__(self, name: str | None) -> bool:
        """Whether it was tried to make a record of a tensor."""
        return name in self._records

    def nbytes(self, name: str, words_bytes: int) -> int | None:
        """What a matrix takes: its record, or else so many bytes of words; None: it is not here."""
        if name not in self._records:
            return None
        record = self._records[name]
        return words_bytes if record is None else record.nbytes

    def read(self, name: str) -> Tensor | None:
        """The record of a tensor, [R] uint8; None where words take no more.

        Raises SpeqError where it is not what was packed.
        """
        wanted = self._records[name]
        if wanted is None:
            return None
        record = torch.empty(wanted.nbytes, dtype=torch.uint8)
        self._file.read_scattered(wanted.offset, record, aligned_bytes(1, ENDS_BYTES)[0])
        if crc32_of(record) != wanted.crc32:
            raise SpeqError(
                f"{self._file.path}: the record of {name}, {wanted.nbytes} bytes at "
                f"{wanted.offset}, is not what was packed; {PACK_AGAIN}"
            )
        return record

    def compare(self) -> int:
        """Read all records; how many there are. Raises SpeqError for the first damaged one."""
        return sum(self.read(name) is not None for name in self._records)

    def close(self) -> None:
        self._file.close()


def _check(checkpoint: Checkpoint, name: str, record: Record | None) -> None:
    """Raise SpeqError for what cannot be the record of a tensor of that name."""
    _, info = checkpoint.tensors.get(name, (None, None))
    if info is None or not recordable(info):
        raise SpeqError(
            f"{checkpoint.path} has a record of {name}, which is no bfloat16 matrix of its shards; "
            "pack the model again"
        )
    fewest = CompactLayout.of_matrix(info.shape, lossless=True).fixed_bytes
    if record is not None and not fewest <= record.nbytes < info.nbytes:
        raise SpeqError(
            f"{checkpoint.path} has a record of {record.nbytes} bytes of {name}; one of a matrix "
            f"{list(info.shape)} has {fewest} or more, and fewer than its {info.nbytes} of words: "
            "pack the model again"
        )
