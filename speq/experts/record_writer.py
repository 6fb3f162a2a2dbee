"""Writing of packed experts, with a journal of those that are on disk.

Data is synced first, then the journal's lines. A later run verifies the journalled experts and
drops everything from the first that differs. A line also has the CRC-32 of the weights that its
expert was made from, and the stamp of the model's files. If the stamp has changed, the weights are
read again and compared, so no pack mixes two versions of a model.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speq.errors import FileError, SpeqError, present
from speq.experts.codec import ExpertCodec
from speq.experts.draft_codes import DraftSource
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.int4 import Int4Expert, Int4Layout, record_of
from speq.experts.packed_draft import DRAFT_FILE, TiedDraft
from speq.experts.packed_store import RECORDS_FILE, Record
from speq.experts.passes import map_in_order, results_in_flight
from speq.experts.striped_records import Stripe, disk_of
from speq.files.alignment import align, allocate_aligned
from speq.files.atomic_file import writing
from speq.files.journal import Journal
from speq.files.range_file import RangeFile, bytes_of, read_at
from speq.kernels.checksum import crc32_of
from speq.units import Done

logger = logging.getLogger("speq")

RESUMES = "packed experts are kept: run the same command to continue"
# Bytes between two syncs, which an interruption may cost.
BATCH_BYTES = 64 << 20
# Fields of a journal's line: offset, bytes and CRC-32 of a packed expert, CRC-32 of its draft's
# codes (or null), CRC-32 of its weights, the stamp of the model's files, and its disk if that is
# the second one.
ENTRY_FIELDS = (6, 7)
# Bytes of an earlier run's codes that are read at a time.
HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """Settings of packing experts and dense matrices.

    draft         source of the codes that experts are decoded with, for a codec that needs one
    dense         names of dense tensors to pack as well
    draft_folder  folder, in the model's, of a draft's checkpoint that is copied along
    stripe        folder on a second disk that gets a part of the experts
    """

    codec: ExpertCodec
    draft: DraftSource | None = None
    dense: tuple[str, ...] = ()
    draft_folder: Path | None = None
    stripe: Path | None = None

    def header(self, source: str) -> dict[str, str | list[str] | None]:
        """Header of a journal: only the same packing of the same model may continue it."""
        draft = None if self.draft is None else self.draft.fingerprint
        stripe = None if self.stripe is None else Stripe.to(self.stripe).entry()
        return {"source": source, "codec": self.codec.name, "draft": draft, "stripe": stripe}

    def check_header(self, header: dict[str, Any], source: str, out: Path) -> None:
        """Raise SpeqError if a journal's header is of another packing."""
        wanted = self.header(source)
        for name, what in (("source", "model"), ("codec", "kind"), ("draft", "draft")):
            if header.get(name, ...) != wanted[name]:
                raise FileError(f"{out} holds an unfinished pack of another {what}; remove it")
        # Journals of earlier versions have no stripe.
        begun, asked = header.get("stripe"), wanted["stripe"]
        if (begun and begun[0]) != (asked and asked[0]):
            found = f"with the stripe {begun[0]}" if begun else "without a stripe"
            raise FileError(f"{out} holds an unfinished pack {found}; give the same, or remove it")

    def base(self, at: int) -> Int4Expert | None:
        """Codes that expert `at` is encoded over, if any."""
        return None if self.draft is None else self.draft.expert(at)

    def most_bytes(self, count: int) -> int:
        """Most bytes of `count` experts on disk, if none is smaller than its plain weights."""
        codes = 0 if self.draft is None else self.draft.layout.nbytes
        return count * (align(self.codec.shape.nbytes) + codes)


@dataclass(slots=True)
class WrittenRecords:
    """Packed experts that are on disk, in order.

    words_crc32s  of the published weights that each was made from
    """

    records: list[Record] = field(default_factory=list)
    words_crc32s: list[int] = field(default_factory=list)


def verify_journal(
    folders: Sequence[Path],
    packing: Packing,
    entries: list[Any],
    words: "PublishedWeights",
    progress: Done | None,
) -> WrittenRecords:
    """Verify the journal's entries; return those up to the first whose expert differs on disk or
    was made from other weights.

    Packed experts and the draft's codes are read again, and the model's weights if its files were
    touched since.

    folders  the pack's own, and its stripe's
    """
    out, written, total = folders[0], WrittenRecords(), words.total
    records = written.records
    if not entries:
        return written
    with ExitStack() as stack:
        try:
            data = [stack.enter_context(RangeFile(each / RECORDS_FILE)) for each in folders]
            codes = None
            if packing.draft is not None:
                codes = stack.enter_context(RangeFile(out / DRAFT_FILE))
            room = allocate_aligned(1, packing.codec.slot_bytes)[0]
            for entry in entries[:total]:
                record = verify_record(entry, packing, records, data, room)
                if codes is not None:
                    check_codes(entry, packing, len(records), codes)
                words.check(entry, len(records))
                records.append(record)
                written.words_crc32s.append(entry[4])
                if progress is not None:
                    progress(len(records), total)
        except (SpeqError, ValueError) as error:
            logger.warning(
                "%s: record %d of %d in the journal does not match the disk or the model; packing "
                "continues from there (%s)",
                out,
                len(records),
                len(entries),
                error,
            )
    return written


class PublishedWeights:
    """Published weights of a model, read to compare them with existing packed experts.

    stamp  present stamp of the model's files
    """

    def __init__(self, store: SafetensorsExpertStore, stamp: str) -> None:
        self.store, self.stamp = store, stamp
        self.total = store.num_layers * store.num_experts
        self._slot: Tensor | None = None

    def crc32(self, at: int) -> int:
        """CRC-32 of the plain weights of expert `at`, counted layer after layer."""
        if self._slot is None:
            self._slot = words_slot(self.store)
        return read_words(self.store, at, self._slot)

    def check(self, entry: list[Any], at: int) -> None:
        """Raise ValueError unless a journal's entry was made from these weights."""
        if len(entry) not in ENTRY_FIELDS or type(entry[4]) is not int:
            raise ValueError("it has no checksum of its weights")
        if entry[5] != self.stamp and self.crc32(at) != entry[4]:
            raise ValueError("it was made from other weights")


def words_slot(store: SafetensorsExpertStore) -> Tensor:
    """Allocate a slot for plain weights, zeroed where nothing is read."""
    return expert_slot(store).zero_()


def read_words(store: SafetensorsExpertStore, at: int, slot: Tensor) -> int:
    """Read expert `at`, counted layer after layer, into a `words_slot`; return its CRC-32."""
    key = divmod(at, store.num_experts)
    store.read(*key, slot)
    return crc32_of(slot[: store.record_bytes(*key)])


def verify_record(
    entry: Any, packing: Packing, before: list[Record], data: Sequence[RangeFile], room: Tensor
) -> Record:
    """Verify the packed expert of a journal's entry. Raises ValueError or SpeqError if it differs.

    data  its file on each disk
    room  buffer for the largest packed expert
    """
    record = record_in(entry, packing, before, len(data))
    nbytes = record.nbytes
    data[record.disk].read_aligned(record.offset, align(nbytes), room)
    if crc32_of(room[:nbytes]) != record.crc32 or bool(room[nbytes : align(nbytes)].any()):
        raise ValueError("its bytes are others")
    return record


def record_in(entry: Any, packing: Packing, before: list[Record], disks: int) -> Record:
    """The packed expert of a journal's entry, after those before it. Raises ValueError if none can
    be there.
    """
    if not isinstance(entry, list):
        raise ValueError("its line is not a record")
    record = Record.of(entry[:3] + entry[6:])
    offset, nbytes, disk = record.offset, record.nbytes, record.disk
    fewest, most = packing.codec.record_range
    if disk >= disks or offset != end_on(disk, before) or not fewest <= nbytes <= most:
        raise ValueError(f"{nbytes} bytes at {offset} of disk {disk}")
    return record


def end_on(disk: int, records: list[Record]) -> int:
    """End of a disk's file of consecutive records."""
    last = next((each for each in reversed(records) if each.disk == disk), None)
    return 0 if last is None else align(last.offset + last.nbytes)


def check_codes(entry: list[Any], packing: Packing, at: int, codes: RangeFile) -> None:
    """Raise ValueError or SpeqError unless the draft's codes of expert `at` are as journalled."""
    nbytes = present(packing.draft, "codes are compared of a pack without a draft").layout.nbytes
    found = torch.empty(nbytes, dtype=torch.uint8)
    codes.read_into(at * nbytes, found)
    if len(entry) not in ENTRY_FIELDS or crc32_of(found) != entry[3]:
        raise ValueError("its draft's codes are others")


class DraftWriter:
    """Writer of draft.bin, which has the codes of `done` experts already."""

    def __init__(self, out: Path, layout: Int4Layout, done: int) -> None:
        self._layout = layout
        self._digest = hashlib.sha256()
        self._file = open_at(out / DRAFT_FILE, done * layout.nbytes)
        for at in range(0, self._file.tell(), HASHED_BYTES):
            self._digest.update(read_at(self._file.fileno(), HASHED_BYTES, at))

    def add(self, codes: Tensor) -> None:
        """Write an expert's codes."""
        self._digest.update(bytes_of(codes))
        self._file.write(bytes_of(codes))

    def sync(self) -> None:
        sync(self._file)

    def describe(self, source: DraftSource) -> TiedDraft:
        """Describe this draft, copied from `source`, for the manifest."""
        return TiedDraft(self._layout, self._digest.hexdigest(), source.fingerprint)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class EncodedExpert:
    """A packed expert, and its draft codes, for a codec that needs them.

    room  buffer of the packed expert, free once it is written
    """

    room: Tensor
    record: Tensor
    crc32: int
    codes: Tensor | None
    codes_crc32: int | None
    words_crc32: int


class RecordMaker:
    """Reader and encoder of experts, for up to `threads` threads at a time."""

    def __init__(self, store: SafetensorsExpertStore, packing: Packing, threads: int) -> None:
        self._store = store
        self._packing = packing
        self._as_published = packing.codec.name == store.codec.name
        self._slots: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(threads):
            self._slots.put(words_slot(store))
        # Pages that no packed expert reaches are never touched.
        self._rooms: SimpleQueue[Tensor] = SimpleQueue()
        for room in allocate_aligned(results_in_flight(threads), packing.codec.slot_bytes):
            self._rooms.put(room.zero_() if self._as_published else room)

    def make(self, at: int) -> EncodedExpert:
        """Read and encode expert `at`, counted layer after layer."""
        room, slot = self._rooms.get(), self._slots.get()
        try:
            if self._as_published:  # it is packed already
                words_crc32 = read_words(self._store, at, room)
                record = room[: self._store.record_bytes(*divmod(at, self._store.num_experts))]
                return EncodedExpert(room, record, words_crc32, None, None, words_crc32)
            words_crc32 = read_words(self._store, at, slot)
            exact = self._store.codec.decode(slot)
            base = self._packing.base(at)
            record = room[: self._packing.codec.encode(exact, base, room)]
            codes = None if base is None else record_of(base)
            codes_crc32 = None if codes is None else crc32_of(codes)
            return EncodedExpert(room, record, crc32_of(record), codes, codes_crc32, words_crc32)
        finally:
            self._slots.put(slot)

    def recycle(self, made: EncodedExpert) -> None:
        self._rooms.put(made.room)


class RecordFiles:
    """The file of packed experts on each disk, written at its end. Raises SpeqError where that of
    the stripe cannot be written, and OSError of the pack's own.
    """

    def __init__(self, folders: Sequence[Path], written: list[Record]) -> None:
        self._folders = folders
        self._ends = [end_on(disk, written) for disk in range(len(folders))]
        self._files: list[BinaryIO] = []
        with ExitStack() as stack:
            for disk, folder in enumerate(folders):
                stack.enter_context(self._writing(disk))  # of opening and of closing
                file = open_at(folder / RECORDS_FILE, self._ends[disk])
                self._files.append(stack.enter_context(file))
            self._opened = stack.pop_all()

    def _writing(self, disk: int) -> AbstractContextManager[None]:
        return writing(self._folders[disk], RESUMES) if disk else nullcontext()

    def add(self, made: "EncodedExpert", disk: int) -> Record:
        record = Record(self._ends[disk], made.record.nbytes, made.crc32, disk)
        self._ends[disk] = end = align(record.offset + record.nbytes)
        with self._writing(disk):
            self._files[disk].write(bytes_of(made.record))
            self._files[disk].write(bytes(end - record.offset - record.nbytes))
        return record

    def sync(self) -> None:
        for disk, file in enumerate(self._files):
            with self._writing(disk):
                sync(file)

    def close(self) -> None:
        self._opened.close()


def write_records(
    store: SafetensorsExpertStore,
    packing: Packing,
    out: Path,
    journal: Journal,
    stamp: str,
    progress: Done | None,
    threads: int = 1,
    share: int = 0,
    synced: Callable[[Sequence[Record]], None] | None = None,
) -> tuple[WrittenRecords, TiedDraft | None]:
    """Write the missing packed experts. Return all of them, and their draft.

    stamp    of the model's files, before the first of them is read
    threads  that read and encode; one is the caller's own
    share    thousandths of the experts that the stripe gets
    synced   called with all records that are on disk, at first and after each sync
    """
    words = PublishedWeights(store, stamp)
    total = words.total
    folders = [out] if packing.stripe is None else [out, packing.stripe]
    written = verify_journal(folders, packing, journal.entries, words, progress)
    records = written.records
    journal.forget(len(records))
    if synced is not None:
        synced(records)
    maker = RecordMaker(store, packing, threads)
    with ExitStack() as stack:
        data = stack.enter_context(closing(RecordFiles(folders, records)))
        draft: DraftWriter | None = None
        if packing.draft is not None:
            draft = DraftWriter(out, packing.draft.layout, len(records))
            stack.enter_context(closing(draft))
        lines: list[list[int | str | None]] = []
        batch_bytes = 0
        making = map_in_order(maker.make, range(len(records), total), threads)
        for made in stack.enter_context(closing(making)):
            record = data.add(made, disk_of(len(records), share))
            records.append(record)
            if draft is not None and made.codes is not None:
                draft.add(made.codes)
            written.words_crc32s.append(made.words_crc32)
            offset, nbytes, crc32, *disk = record.entry()
            crc32s = made.codes_crc32, made.words_crc32
            lines.append([offset, nbytes, crc32, *crc32s, stamp, *disk])
            batch_bytes += made.record.nbytes
            maker.recycle(made)
            if batch_bytes >= BATCH_BYTES or len(records) == total:
                data.sync()
                if draft is not None:
                    draft.sync()
                journal.add(*lines)
                lines, batch_bytes = [], 0
                if synced is not None:
                    synced(records)
            if progress is not None:
                progress(len(records), total)
    return written, None if draft is None or packing.draft is None else draft.describe(
        packing.draft
    )


def open_at(path: Path, end: int) -> BinaryIO:
    """Open or create a file, truncated to `end`, for appending."""
    with ExitStack() as undo:
        file = undo.enter_context(path.open("r+b" if path.exists() else "w+b"))
        file.truncate(end)
        file.seek(end)
        undo.pop_all()
    return file


def sync(file: BinaryIO) -> None:
    """Sync a file to disk, and drop it from the page cache, which has better uses."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
