"""Writes the records of a pack, and journals those that are on the disk.

Data goes to the disk first, then the journal's lines: what it names is there, and behind its last
whole line nothing counts.
"""

import hashlib
import json
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec
from speq.experts.draft_codes import DraftSource
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot, read_matrices
from speq.experts.int4 import Int4Expert, Int4Layout, record_of
from speq.experts.packed_draft import DRAFT_FILE, TiedDraft
from speq.experts.packed_store import RECORDS_FILE, Record, crc32_of
from speq.files.alignment import aligned, aligned_bytes
from speq.files.atomic_file import replacing
from speq.files.checkpoint import EXPERTS_JOURNAL
from speq.files.range_file import bytes_of
from speq.units import Done

# Written between two syncs: what an interruption costs at most.
BATCH_BYTES = 256 << 20
# Of codes that an earlier run wrote, read at a time.
HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """What experts become. draft: what records are read over, of a codec that needs one."""

    codec: ExpertCodec
    draft: DraftSource | None = None

    def named(self, source: str) -> dict[str, str | None]:
        """What a journal begins with: only the same packing of the same model goes on with it."""
        draft = None if self.draft is None else self.draft.fingerprint
        return {"source": source, "codec": self.codec.name, "draft": draft}

    def base(self, at: int) -> Int4Expert | None:
        """The codes that expert `at` is read over."""
        return None if self.draft is None else self.draft.expert(at)

    def most_bytes(self, count: int) -> int:
        """What so many experts take on the disk, records as large as raw ones."""
        codes = 0 if self.draft is None else self.draft.layout.nbytes
        return count * (aligned(self.codec.shape.nbytes) + codes)


def journalled(out: Path, packing: Packing, source: str) -> list[Record]:
    """Records that an earlier run is known to have written, after beginning a journal if need be.

    A line that is cut off ends what is known.
    """
    path = out / EXPERTS_JOURNAL
    wanted = packing.named(source)
    if not path.exists():
        with replacing(path) as file:
            file.write(json.dumps(wanted).encode() + b"\n")
        return []
    lines = path.read_bytes().split(b"\n")
    try:
        begun = json.loads(lines[0])
        unlike = [name for name in wanted if begun[name] != wanted[name]]
    except (ValueError, KeyError, TypeError) as error:
        raise SpeqError(f"{path} is damaged; remove {out} and pack again") from error
    if unlike:
        what = {"source": "model", "codec": "kind", "draft": "draft"}[unlike[0]]
        raise SpeqError(f"{out} holds an unfinished pack of another {what}; remove it")
    records = []
    for line in lines[1:-1]:
        try:
            records.append(Record(*json.loads(line)))
        except (ValueError, TypeError):
            break
    return records


class DraftWriter:
    """draft.bin, of which the codes of `done` experts are there already."""

    def __init__(self, out: Path, layout: Int4Layout, done: int) -> None:
        self._layout = layout
        self._digest = hashlib.sha256()
        self._file = opened(out / DRAFT_FILE, done * layout.nbytes)
        for at in range(0, self._file.tell(), HASHED_BYTES):
            self._digest.update(os.pread(self._file.fileno(), HASHED_BYTES, at))

    def add(self, expert: Int4Expert) -> None:
        codes = record_of(expert)
        self._digest.update(bytes_of(codes))
        self._file.write(bytes_of(codes))

    def sync(self) -> None:
        sync(self._file)

    def tied(self) -> TiedDraft:
        """What the records of this draft's experts are read over."""
        return TiedDraft(self._layout, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def write_records(
    store: SafetensorsExpertStore,
    packing: Packing,
    out: Path,
    done: list[Record],
    progress: Done | None,
) -> tuple[list[Record], TiedDraft | None]:
    """Write the records that are not done yet, in batches; all of them, and what they are over."""
    records = list(done)
    total = store.num_layers * store.num_experts
    slot = expert_slot(store)
    room = aligned_bytes(1, packing.codec.slot_bytes)[0]
    end = aligned(records[-1].offset + records[-1].nbytes) if records else 0
    with ExitStack() as stack:
        data = stack.enter_context(opened(out / RECORDS_FILE, end))
        journal = stack.enter_context((out / EXPERTS_JOURNAL).open("r+b"))
        # A journal's cut-off end is written over.
        journal.truncate(sum(map(len, journal.readlines()[: 1 + len(done)])))
        journal.seek(0, os.SEEK_END)
        draft: DraftWriter | None = None
        if packing.draft is not None:
            draft = DraftWriter(out, packing.draft.layout, len(done))
            stack.enter_context(closing(draft))
        batch: list[Record] = []
        for at in range(len(records), total):
            exact = read_matrices(store, *divmod(at, store.num_experts), slot)
            base = packing.base(at)
            record = room[: packing.codec.encode(exact, base, room)]
            data.write(bytes_of(record))
            batch.append(Record(end, record.nbytes, crc32_of(record)))
            end = aligned(end + record.nbytes)
            data.write(bytes(end - batch[-1].offset - record.nbytes))
            if draft is not None and base is not None:
                draft.add(base)
            if sum(each.nbytes for each in batch) >= BATCH_BYTES or at + 1 == total:
                sync(data)
                if draft is not None:
                    draft.sync()
                for each in batch:
                    line = json.dumps([each.offset, each.nbytes, each.crc32])
                    journal.write(line.encode() + b"\n")
                sync(journal)
                records += batch
                batch = []
            if progress is not None:
                progress(at + 1, total)
    return records, None if draft is None else draft.tied()


def opened(path: Path, end: int) -> BinaryIO:
    """A file cut at `end`, where writing goes on; made if need be. Raises SpeqError if shorter."""
    file = path.open("r+b" if path.exists() else "w+b")
    if file.seek(0, os.SEEK_END) < end:
        file.close()
        raise SpeqError(
            f"{path} is shorter than the {end} bytes that were journalled; remove {path.parent} "
            "and pack again"
        )
    file.truncate(end)
    file.seek(end)
    return file


def sync(file: BinaryIO) -> None:
    """Have what was written on the disk, and not in the page cache, which has better uses."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
