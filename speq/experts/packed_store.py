"""Experts as `speq pack` writes them: each packed contiguously, aligned and with a checksum.

experts.json  the manifest: form and places of the packed experts
experts.bin   the packed experts, layer by layer, each at a multiple of 4,096 bytes; a part of them
              may be in a file of the same name on a second disk (`striped_records`)
draft.bin     with the residual codec: the draft that it needs (`packed_draft`)
dense.bin     with compact codecs: packed dense matrices (`packed_dense`)
"""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.errors import FileError, SpeqError
from speq.experts.codec import ExpertCodec, ExpertShape, codec_of
from speq.experts.expert_store import ExpertLayout, ExpertStore, SafetensorsExpertStore
from speq.experts.mirrored_records import MirroredRecords, open_mirror
from speq.experts.packed_draft import TiedDraft
from speq.experts.striped_records import Stripe
from speq.files.alignment import ALIGNMENT, align
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint
from speq.files.checksums import PACK_AGAIN, Checksums, check_seal, seal
from speq.files.fp8_settings import SQUARES, Fp8Blocks
from speq.files.json_file import read_json
from speq.files.packing import Int4Groups
from speq.files.published_format import FORMATS, WORDS
from speq.files.range_file import RangeFile
from speq.files.safetensors_file import DTYPE_NAMES, DTYPES
from speq.kernels.checksum import crc32_of
from speq.registries import CODECS

RECORDS_FILE = "experts.bin"
FORMAT = "speq-experts-2"
# Of packs in FP8 with other blocks than 128 by 128, whose scales earlier versions would misread.
BLOCKS_FORMAT = "speq-experts-3"
# Of packs on two disks, whose second one earlier versions would not look for.
STRIPED_FORMAT = "speq-experts-4"
FORMATS_READ = (FORMAT, BLOCKS_FORMAT, STRIPED_FORMAT)
SIZES = ("hidden_size", "expert_width", "num_layers", "num_experts", "alignment")


@dataclass(frozen=True, slots=True)
class Record:
    """Offset, size and CRC-32 of a packed expert or matrix; disk: 1 if its file is the stripe's."""

    offset: int
    nbytes: int
    crc32: int
    disk: int = 0

    def entry(self) -> list[int]:
        """The record in a manifest. Those of the first disk name none, as in earlier versions."""
        return [self.offset, self.nbytes, self.crc32, *([self.disk] if self.disk else [])]

    @classmethod
    def of(cls, entry: Any) -> "Record":
        """Raises ValueError for an entry that is none."""
        return cls(*_sizes(entry, 4 if isinstance(entry, list) and len(entry) == 4 else 3))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of experts.json. Layers count MoE layers only; records are ordered by layer, then
    expert.

    source  fingerprint of the checkpoint that was packed
    draft   the draft that experts are decoded with, for a codec that needs one
    checksums  checksums of everything else; None in packs of earlier versions
    groups, divides, blocks  of INT4, NVFP4 and FP8, as in `ExpertShape`
    gated   whether experts have a gate
    dense   records in dense.bin, by tensor name; None for a matrix that packing would not make
            smaller
    stripe  the folder on a second disk that has some of the records; None: it has none
    """

    codec: str
    dtype: str
    hidden_size: int
    expert_width: int
    num_layers: int
    num_experts: int
    source: str
    records: tuple[Record, ...]
    draft: TiedDraft | None = None
    checksums: Checksums | None = None
    dense: dict[str, Record | None] = field(default_factory=dict)
    groups: Int4Groups | None = None
    divides: bool = False
    blocks: Fp8Blocks = SQUARES
    gated: bool = True
    alignment: int = ALIGNMENT
    stripe: Stripe | None = None

    def to_json(self) -> str:
        entries = {field.name: getattr(self, field.name) for field in fields(self)}
        entries["format"] = FORMAT if self.blocks == SQUARES else BLOCKS_FORMAT
        del entries["stripe"]
        if self.stripe is not None:
            entries |= {"format": STRIPED_FORMAT, "stripe": self.stripe.entry()}
        entries["records"] = [record.entry() for record in self.records]
        entries["dense"] = {name: each and each.entry() for name, each in self.dense.items()}
        entries["draft"] = self.draft and self.draft.entry()
        entries["checksums"] = self.checksums and self.checksums.entry()
        return json.dumps(seal(entries)) + "\n"

    @property
    def record_bytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.record_bytes / (len(self.records) * self.shape.weights)

    @property
    def shape(self) -> ExpertShape:
        published = self.codec if self.codec in FORMATS else WORDS
        return ExpertShape(
            *(self.hidden_size, self.expert_width, DTYPES[self.dtype], published),
            *(self.groups, self.divides, self.blocks, self.gated),
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """Size of experts.bin in bytes, on each disk."""
        return tuple(end_of(r for r in self.records if r.disk == disk) for disk in self.disks)

    @property
    def disks(self) -> range:
        return range(1 if self.stripe is None else 2)

    @classmethod
    def of(cls, path: Path) -> "Manifest":
        """Read a manifest. Raises SpeqError if it is damaged or of another version."""
        entries = read_json(path, "pack the model again")
        if entries.get("format") not in FORMATS_READ:
            raise FileError(
                f"{path} has format {entries.get('format')!r}; this version reads "
                f"{', '.join(FORMATS_READ)}: pack the model again"
            )
        check_seal(path, entries)
        try:
            records = tuple(map(Record.of, entries["records"]))
            stripe = entries.get("stripe")
            if stripe is not None:
                stripe = Stripe.of(stripe)
            texts = {name: _text(entries[name]) for name in ("codec", "dtype", "source")}
            sizes = {name: _sizes([entries[name]], 1)[0] for name in SIZES}
            gated = bool(entries.get("gated", True))  # packs of earlier versions have no entry
            draft = entries.get("draft")
            if draft is not None:
                draft = TiedDraft.of(draft, sizes["hidden_size"], sizes["expert_width"], gated)
            checksums = entries.get("checksums")
            if checksums is not None:
                checksums = Checksums.of(checksums)
            dense = {
                name: None if entry is None else Record.of(entry)
                for name, entry in entries.get("dense", {}).items()
            }
            groups = None
            if entries.get("groups") is not None:
                # Packs of earlier versions have no third entry: their scales are bfloat16.
                size, *flags = entries["groups"]
                groups = Int4Groups(_sizes([size], 1)[0], *map(bool, flags))
            # Packs of earlier versions have none: their blocks are of 128 rows and columns.
            blocks = Fp8Blocks(*_sizes(entries.get("blocks", [*SQUARES]), 2))
            if not blocks.multiplied:
                raise ValueError(f"blocks of FP8 are {blocks}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is damaged ({error!r}); pack the model again") from error
        manifest = cls(
            records=records,
            draft=draft,
            checksums=checksums,
            dense=dense,
            groups=groups,
            divides=bool(entries.get("divides")),
            blocks=blocks,
            gated=gated,
            stripe=stripe,
            **texts,  # type: ignore[arg-type]
            **sizes,  # type: ignore[arg-type]
        )
        manifest.check(path)
        return manifest

    def check(self, path: Path) -> None:
        """Raise SpeqError unless all records are there, consecutive and aligned."""
        on_disks = ([r for r in self.records if r.disk == disk] for disk in self.disks)
        if any(record.disk not in self.disks for record in self.records):
            raise FileError(f"{path} has records on a disk that it does not name; {PACK_AGAIN}")
        for records in (*on_disks, self.dense.values()):
            end = 0
            for record in records:
                if record is None:
                    continue
                if record.offset != end or not record.nbytes:
                    raise FileError(
                        f"{path} puts a record of {record.nbytes} bytes at {record.offset}, where "
                        f"the one before ends at {end}; pack the model again"
                    )
                end = end_of([record])
        wanted = self.num_layers * self.num_experts
        if len(self.records) != wanted or not wanted or self.alignment != ALIGNMENT:
            raise FileError(
                f"{path} has {len(self.records)} records aligned to {self.alignment} bytes; it "
                f"must have {wanted}, aligned to {ALIGNMENT}: pack the model again"
            )
        if self.codec not in CODECS or self.dtype not in DTYPES:
            raise FileError(
                f"{path} has codec {self.codec!r} and dtype {self.dtype!r}; this version reads "
                f"{', '.join(CODECS.names)}: pack the model again"
            )
        if CODECS[self.codec].needs_draft != (self.draft is not None):
            raise FileError(
                f"{path} has codec {self.codec} and {'a' if self.draft else 'no'} draft; residual "
                "records have one, and no others: pack the model again"
            )


class VerifiedBytes:
    """Bytes verified by checksums, and seconds over all threads."""

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.seconds += seconds


class PackedExpertStore:
    """Store of a packed model's experts. It verifies each one's checksum at its first read, or at
    every read if `verify_reads` is set.

    layout    of all of the model's experts
    own       layers to read; None: all
    verified  bytes and seconds of verification so far

    Raises SpeqError if the manifest or the experts are damaged or do not match the model.
    """

    published = False

    def __init__(
        self, folder: Path, layout: ExpertLayout, own: tuple[int, ...] | None = None
    ) -> None:
        path = folder / EXPERTS_MANIFEST
        self.manifest = Manifest.of(path)
        self._layers = [layout.layers.index(layer) for layer in own or layout.layers]
        self.num_layers = len(self._layers)
        self.num_experts = self.manifest.num_experts
        self.verify_reads = False
        self.verified = VerifiedBytes()
        self.reading_bytes = 0
        given = [getattr(self.manifest, name) for name in SIZES[:4]]
        wanted = [layout.hidden_size, layout.expert_width, len(layout.layers), layout.num_experts]
        if given != wanted:
            raise FileError(
                f"{path} holds hidden size, expert width, layers and experts {given}; config.json "
                f"makes them {wanted}: pack the model again"
            )
        codec = codec_of(self.manifest.codec, self.manifest.shape)
        fewest, most = codec.record_range
        sizes = [record.nbytes for record in self.manifest.records]
        odd = [nbytes for nbytes in sizes if not fewest <= nbytes <= most]
        if odd:
            raise FileError(
                f"{path} has a record of {odd[0]} bytes; {codec.name} experts of "
                f"{codec.shape.dtype} have {fewest if fewest == most else f'{fewest} to {most}'}: "
                "pack the model again"
            )
        self._codec = codec.with_slot_bytes(max(self.record_bytes(*each) for each in self._own()))
        self._file = RangeFile(folder / RECORDS_FILE)
        size, *others = self.manifest.ends
        if self._file.size != size:
            self._file.close()
            raise FileError(
                f"{self._file.path} has {self._file.size} bytes and its manifest says "
                f"{size}; pack the model again"
            )
        # By disk: files that have its records.
        disks = [[self._file]]
        if self.manifest.stripe is not None:
            try:
                disks.append([self.manifest.stripe.open(RECORDS_FILE, *others)])
            except SpeqError:
                self._file.close()
                raise
        elif (mirror := open_mirror(folder, size)) is not None:
            disks[0].append(mirror)
        self._records = [MirroredRecords(files) for files in disks]
        # By file and record, 1: verified.
        self._sound = {file: bytearray(len(self.manifest.records)) for file in chain(*disks)}

    @property
    def codec(self) -> ExpertCodec:
        return self._codec

    @property
    def source(self) -> ExpertStore:
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._sound)

    @property
    def tied_draft(self) -> TiedDraft | None:
        return self.manifest.draft

    def _own(self) -> Iterable[tuple[int, int]]:
        return product(range(self.num_layers), range(self.num_experts))

    def _at(self, layer: int, expert: int) -> int:
        """Number of an expert's record."""
        return self._layers[layer] * self.num_experts + expert

    def record_bytes(self, layer: int, expert: int) -> int:
        return self.manifest.records[self._at(layer, expert)].nbytes

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self.record_bytes(layer, expert)

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        at = self._at(layer, expert)
        wanted = self.manifest.records[at]
        verify = partial(self._verify, at, slot)
        return self._records[wanted.disk].read(wanted.offset, wanted.nbytes, slot, verify)

    def _verify(self, at: int, slot: Tensor, file: RangeFile) -> None:
        """Compare a record that was read from one of the files with its checksum."""
        if self._sound[file][at] and not self.verify_reads:
            return
        wanted = self.manifest.records[at]
        begun_s = time.perf_counter()
        sound = crc32_of(slot[: wanted.nbytes]) == wanted.crc32
        self.verified.add(wanted.nbytes, time.perf_counter() - begun_s)
        if not sound:
            raise FileError(
                f"{file.path}: the record of {self._describe(at)}, {wanted.nbytes} bytes at "
                f"{wanted.offset}, is not what was packed; {PACK_AGAIN}"
            )
        self._sound[file][at] = 1

    def compare(self, layer: int, expert: int, slot: Tensor) -> None:
        """Read an expert from each file that has it. Raises SpeqError where one is not what was
        packed.
        """
        at = self._at(layer, expert)
        wanted = self.manifest.records[at]
        for file in self._records[wanted.disk].files:
            file.read_aligned(wanted.offset, wanted.nbytes, slot)
            self._verify(at, slot, file)

    def _describe(self, at: int) -> str:
        """Name of an expert in messages."""
        layer, expert = divmod(at, self.num_experts)
        return f"expert {expert} in MoE layer {layer}"

    def close(self) -> None:
        for records in self._records:
            records.close()


def open_experts(
    checkpoint: Checkpoint,
    layout: ExpertLayout,
    verify_reads: bool = False,
    whole: ExpertLayout | None = None,
) -> ExpertStore:
    """Open the experts of a model folder, packed or as published.

    layout  of the experts to read
    whole   of all of a pack's experts, if `layout` is a part of them; None: it is all
    verify_reads  verify a pack's experts at every read, not only at the first
    """
    if (checkpoint.path / EXPERTS_MANIFEST).exists():
        store = PackedExpertStore(checkpoint.path, whole or layout, layout.layers)
        store.verify_reads = verify_reads
        return store
    return SafetensorsExpertStore(checkpoint, layout)


def end_of(records: Iterable[Record]) -> int:
    """Size of a file of records in bytes."""
    return max((align(record.offset + record.nbytes) for record in records), default=0)


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES[dtype]


def _sizes(values: Any, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r} is not a list of {count} numbers")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is not a size")
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value
