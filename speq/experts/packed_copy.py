"""Packed copy of a published model's experts, in the user's cache folder.

A published checkpoint has 16-bit weights, with the matrices of an expert scattered. The first run
of a model larger than memory reads these, while a thread writes the experts losslessly packed, one
after another. The thread mostly rests while tokens are generated, and works while the generator is
idle. Records that are on disk are read in the same run (`speq.experts.encoding_store`). Later runs
read the packed copy. If a run ends first, the next one continues.

A copy is used as long as its source files are untouched. If they were touched, a run reads them,
and its thread compares their experts with the copy. If they are the same, later runs use the copy
again; if not, it is made anew.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, codec_of, codecs_for, usual_bytes
from speq.experts.copied_store import SOURCE_FILE, CopiedExperts, CopySource
from speq.experts.expert_store import ExpertLayout, ExpertStore, SafetensorsExpertStore
from speq.experts.packed_store import (
    FORMAT,
    RECORDS_FILE,
    Manifest,
    Record,
    VerifiedBytes,
    dtype_name,
)
from speq.experts.record_writer import Packing, PublishedWeights, record_in, write_records
from speq.files import kept
from speq.files.alignment import ALIGNMENT, align, allocate_aligned
from speq.files.alone import FolderTaken, lock_folder
from speq.files.atomic_file import replacing
from speq.files.cache_folder import cache_folder
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST, Checkpoint
from speq.files.contents import check_unchanged, stamp
from speq.files.journal import Journal
from speq.files.range_file import RangeFile
from speq.kernels.checksum import crc32_of
from speq.units import Done, format_bytes

logger = logging.getLogger("speq")

CODEC = "lossless"
# Smaller models load in a second, and their users expect no files.
LEAST_BYTES = 1 << 30
# Share of the disk that stays free.
SPARE_SHARE = 0.05
# While tokens are generated, the thread rests this many times as long as it works, so it takes at
# most a tenth of a core. (A low priority would cost more: a waiting thread that holds the GIL
# delays all others.)
REST = 9


class CopyStopped(Exception):
    """The run ends; the journalled part of the copy stays."""


def copy_folder(checkpoint: Checkpoint) -> Path | None:
    """Folder of a checkpoint's copy; None for a user without a home.

    A checkpoint with other weights may have the same folder: source.json tells them apart.
    """
    named = f"{checkpoint.fingerprint()} {CODEC} {FORMAT}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    folder = cache_folder(kept.COPIES)
    return None if folder is None else folder / digest


def open_copy(
    checkpoint: Checkpoint, layout: ExpertLayout, words: SafetensorsExpertStore
) -> CopiedExperts | None:
    """Open the complete copy of a checkpoint's experts; None if there is none that is known to
    match its present files.

    A damaged copy is reported and begun anew.
    """
    folder = copy_folder(checkpoint)
    if folder is None or not (folder / EXPERTS_MANIFEST).exists():
        return None
    try:
        source = CopySource.of(folder)
        store = CopiedExperts(folder, layout, words, source)
    except SpeqError as error:
        logger.warning("%s has no usable copy of the experts and is not read: %s", folder, error)
        remove_copy(folder)
        return None
    if not source.holds(stamp(checkpoint)):
        store.close()
        return None
    with contextlib.suppress(OSError):  # time of the last use
        os.utime(folder / EXPERTS_MANIFEST)
    logger.info("experts are read from the packed copy in %s", folder)
    return store


def remove_copy(folder: Path) -> None:
    """Remove an unusable copy. Readers continue with the open file."""
    for name in (EXPERTS_MANIFEST, EXPERTS_JOURNAL, RECORDS_FILE):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def copy_codec(store: ExpertStore) -> ExpertCodec | None:
    """Codec of a copy of these experts; None if it is impossible or not worth it."""
    shape = store.codec.shape
    count = store.num_layers * store.num_experts
    if not store.published or CODEC not in codecs_for(shape):
        return None
    return codec_of(CODEC, shape) if count * shape.nbytes >= LEAST_BYTES else None


class PackedCopy:
    """A copy that a thread of its own is writing.

    store  the published experts, which the run reads at the same time
    """

    def __init__(self, checkpoint: Checkpoint, store: SafetensorsExpertStore, folder: Path) -> None:
        self.folder = folder
        # Whether an earlier copy is compared first, so that no record is read for long: known once
        # it has been asked whether this is possible.
        self.compares = False
        self.total = store.num_layers * store.num_experts
        self.done = 0
        self._checkpoint, self._store = checkpoint, store
        self._stamp = stamp(checkpoint)  # before anything is read
        self._packing = Packing(codec_of(CODEC, store.codec.shape))
        self._stopping = False
        self._alone = threading.Event()  # or stopping: either way there is no reason to rest
        self._alone.set()
        self._begun_s = 0.0
        self.verified = VerifiedBytes()
        self._file: RangeFile | None = None
        self._readable: list[Record] = []
        self._told = False
        self._thread = threading.Thread(target=self._run, name="speq-packed-copy", daemon=True)

    @property
    def writing_bytes(self) -> int:
        """Memory that it takes: an expert's weights, its packed form, and read buffers."""
        codec = self._packing.codec
        room = codec.shape.nbytes + usual_bytes(codec) + 2 * ALIGNMENT
        return room + 2 * self._store.reading_bytes

    @property
    def usual_bytes(self) -> int:
        """Approximate size of the copy on disk."""
        return self.total * align(usual_bytes(self._packing.codec))

    @property
    def codec(self) -> ExpertCodec:
        return self._packing.codec

    @property
    def model(self) -> str:
        """Folder of the model, without links."""
        return os.path.realpath(self._checkpoint.path)

    @cached_property
    def is_possible(self) -> bool:
        """True if there is something to write or to compare, no other run does, and the disk has
        room, with a log line. It is asked once.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._alone_there():
                pass
            if (self.folder / EXPERTS_MANIFEST).exists():
                if CopySource.of(self.folder).holds(self._stamp):
                    return False  # another run has made it meanwhile
                logger.warning(
                    "the files of %s were touched or replaced since their packed copy was made: "
                    "this run reads them, and compares them with it meanwhile; later runs read the "
                    "copy again if they are the same, and it is made anew if not",
                    self._checkpoint.path,
                )
                self.compares = True
            elif not self._has_room():
                return False
        except FolderTaken as error:
            logger.info("no packed copy of the experts is made: %s", error)
            return False
        except (OSError, SpeqError) as error:
            logger.warning("no packed copy of the experts is made: %s", error)
            return False
        return True

    def begin(self) -> None:
        """Start to write, if that is possible."""
        if not self.is_possible:
            return
        # A process may end without closing its models, but not while the thread runs.
        atexit.register(self.stop)
        self._thread.start()

    def _has_room(self) -> bool:
        """Check that the rest of the copy fits the limit and the disk, with a log line.

        Older copies of the same folder are removed first. Raises OSError.
        """
        kept.remove_others(self.folder, self.model)
        records = self.folder / RECORDS_FILE
        left = max(self.usual_bytes - (records.stat().st_size if records.exists() else 0), 0)
        limit = kept.limit_bytes()
        if limit is not None and not kept.keep_within(limit, left, self.folder):
            logger.warning(
                "no packed copy of the experts is made: it takes %s, and `speq cache limit` is %s",
                format_bytes(self.usual_bytes),
                format_bytes(limit),
            )
            return False
        usage = shutil.disk_usage(self.folder)
        room = usage.free - int(SPARE_SHARE * usage.total)
        if left > room:
            logger.warning(
                "no packed copy of the experts is made: it takes %s, and the disk of %s has %s to "
                "spare; `speq pack` writes one elsewhere, and `speq cache` shows what is kept",
                format_bytes(left),
                self.folder,
                format_bytes(max(room, 0)),
            )
            return False
        logger.warning(
            "later runs will read experts faster: a packed copy is being made in %s, which takes "
            "%s; --packed-copy none makes none, and `speq cache` lists and removes it",
            self.folder,
            format_bytes(self.usual_bytes),
        )
        return True

    def stop(self) -> None:
        """Stop writing, and return once the thread has ended."""
        self._stopping = True
        self._alone.set()
        if self._thread.ident is not None:
            self._thread.join()
            atexit.unregister(self.stop)

    def wait(self) -> None:
        """Wait until the copy is complete or has failed."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the file that `read` reads. No read may be going on."""
        self._readable = []
        if self._file is not None:
            self._file.close()

    def read(self, at: int, slot: Tensor) -> Record | None:
        """Read the record of expert `at`, counted layer after layer, into a slot of any thread's.
        None if it is not on disk yet, or not what was written, or larger than the slot.

        Each read is compared with its checksum: the thread may find records of an earlier run
        damaged and write others in their place.
        """
        records, file = self._readable, self._file
        if at >= len(records) or file is None or records[at].nbytes > len(slot):
            return None
        record = records[at]
        try:
            file.read_aligned(record.offset, record.nbytes, slot)
            begun_s = time.perf_counter()
            found = crc32_of(slot[: record.nbytes])
            self.verified.add(record.nbytes, time.perf_counter() - begun_s)
            if found == record.crc32:
                return record
            reason = "it is not what was written"
        except SpeqError as error:
            reason = str(error)
        if not self._told:
            self._told = True
            logger.warning(
                "%s: record %d of the packed copy in the making is read from the model: %s",
                *(self.folder, at, reason),
            )
        return None

    def _let_read(self, records: Sequence[Record]) -> None:
        """Let `read` have records that are on disk, and no others."""
        if self._file is None and records:
            self._file = RangeFile(self.folder / RECORDS_FILE)
        self._readable = list(records)

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Make the thread rest most of the time inside the block, which generates tokens."""
        self._alone.clear()
        try:
            yield
        finally:
            self._alone.set()

    def _alone_there(self) -> AbstractContextManager[None]:
        return lock_folder(self.folder, f"another run writes to {self.folder}")

    def _run(self) -> None:
        try:
            with self._alone_there():
                self._write()
        except CopyStopped:
            logger.info("%d of %d experts are in the packed copy", self.done, self.total)
        except FolderTaken as error:
            logger.info("no packed copy of the experts is made: %s", error)
        except (SpeqError, OSError) as error:
            logger.warning("the packed copy of the experts is not finished: %s", error)

    def _write(self) -> None:
        self._begun_s = time.perf_counter()
        if (self.folder / EXPERTS_MANIFEST).exists():
            if self._still_holds():  # or another run has made it meanwhile
                return
            logger.warning("%s has other experts now: their packed copy is made anew", self.model)
            remove_copy(self.folder)
        fingerprint = self._checkpoint.fingerprint()
        source = CopySource(self.model, fingerprint)
        ours = {EXPERTS_JOURNAL, EXPERTS_MANIFEST, RECORDS_FILE, SOURCE_FILE, "lock"}
        journal = Journal(
            self.folder / EXPERTS_JOURNAL, self._packing.header(fingerprint), ours.__contains__
        )
        self._packing.check_header(journal.header, fingerprint, self.folder)
        source.write(self.folder)
        with contextlib.suppress(SpeqError):  # packing says what is wrong with the file
            self._let_read(self._unchanged(journal.entries))
        written, _ = write_records(
            self._store,
            self._packing,
            self.folder,
            journal,
            self._stamp,
            self._report_progress,
            synced=self._let_read,
        )
        check_unchanged(self._checkpoint, self._stamp)
        codec = self._packing.codec
        manifest = Manifest(
            codec=codec.name,
            dtype=dtype_name(codec.shape.dtype),
            hidden_size=codec.shape.hidden_size,
            expert_width=codec.shape.expert_width,
            num_layers=self._store.num_layers,
            num_experts=self._store.num_experts,
            gated=codec.shape.gated,
            source=fingerprint,
            records=tuple(written.records),
        )
        source.words_crc32s = written.words_crc32s
        source.note(self._stamp, self.total)
        source.write(self.folder)
        with replacing(self.folder / EXPERTS_MANIFEST) as file:
            file.write(manifest.to_json().encode())
        journal.path.unlink(missing_ok=True)
        logger.info("the packed copy of the experts is whole: the next run reads it")

    def _unchanged(self, entries: Sequence[Any]) -> list[Record]:
        """The first records of an earlier run's journal, of the same files: those that can be read
        before they are verified.
        """
        records: list[Record] = []
        with contextlib.suppress(ValueError):
            for entry in entries[: self.total]:
                record = record_in(entry, self._packing, records, 1)
                if entry[5:6] != [self._stamp]:
                    break
                records.append(record)
        return records

    def _still_holds(self) -> bool:
        """Compare the existing copy with the model's files, which are all read.

        If stopped, the next run continues. Raises Stopped.
        """
        try:
            source = CopySource.of(self.folder)
        except SpeqError:
            return False
        if len(source.words_crc32s) != self.total:
            return False
        words = PublishedWeights(self._store, self._stamp)
        compared = source.compared.get(self._stamp, 0)
        if compared == self.total:
            return True
        try:
            for at in range(compared, self.total):
                if words.crc32(at) != source.words_crc32s[at]:
                    return False
                compared = at + 1
                self._report_progress(compared, self.total)
            check_unchanged(self._checkpoint, self._stamp)
            source.model = self.model  # it may have moved
        except CopyStopped:
            source.note(self._stamp, compared)
            source.write(self.folder)
            raise
        source.note(self._stamp, compared)
        source.write(self.folder)
        logger.info("the packed copy of the experts is of the same weights: the next run reads it")
        return True

    def _report_progress(self, done: int, total: int) -> None:
        self.done = done
        self._alone.wait(REST * (time.perf_counter() - self._begun_s))
        if done < total and self._stopping:
            raise CopyStopped
        self._begun_s = time.perf_counter()


def damaged_records(folder: Path, progress: Done | None = None) -> list[int]:
    """Read a whole copy and return the numbers of damaged experts. Raises SpeqError if the copy is
    incomplete.

    progress  called with (experts done, experts in all)
    """
    manifest = Manifest.of(folder / EXPERTS_MANIFEST)
    most = max(record.nbytes for record in manifest.records)
    slot, found = allocate_aligned(1, align(most))[0], []
    with RangeFile(folder / RECORDS_FILE) as file:
        for at, record in enumerate(manifest.records):
            try:
                file.read_aligned(record.offset, record.nbytes, slot)
                sound = crc32_of(slot[: record.nbytes]) == record.crc32
            except SpeqError:
                sound = False
            if not sound:
                found.append(at)
            if progress is not None:
                progress(at + 1, len(manifest.records))
    return found
