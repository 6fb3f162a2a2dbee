"""A packed copy of a published model's experts, in the user's cache folder.

A published checkpoint holds words of 16 bits, the matrices of an expert here and there. The first
run that is larger than its memory goes by these, and a thread meanwhile writes the experts anew:
lossless records, one behind the other. It mostly rests while tokens are generated, and never while
a generator waits to be asked. Later runs read the records. What an end of the run interrupts, the
next run goes on with.
"""

import atexit
import contextlib
import fcntl
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, codec_of, codecs_for, usual_bytes
from speq.experts.expert_store import ExpertLayout, ExpertStore, SafetensorsExpertStore
from speq.experts.packed_store import (
    FORMAT,
    RECORDS_FILE,
    Manifest,
    PackedExpertStore,
    dtype_name,
)
from speq.experts.record_writer import Packing, write_records
from speq.files.alignment import ALIGNMENT, aligned
from speq.files.atomic_file import replacing
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST, Checkpoint
from speq.files.journal import Journal
from speq.units import format_bytes

logger = logging.getLogger("speq")

CODEC = "lossless"
LOCK = "lock"
# Smaller models are read anew in a second, and their users expect no files.
LEAST_BYTES = 1 << 30
# Of the disk this stays free.
SPARE_SHARE = 0.05
# While tokens are generated the thread rests so many times as long as it works: it takes a tenth of
# a core at most. (A low priority would cost more: a thread that is kept waiting while it holds
# Python's lock delays all.)
REST = 9


class Stopped(Exception):
    """The run ends: what was journalled stays."""


def copy_folder(checkpoint: Checkpoint) -> Path | None:
    """Where the copy of a checkpoint lies; None for a user without a home."""
    named = f"{checkpoint.fingerprint()} {CODEC} {FORMAT}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    try:
        return Path.home() / ".cache" / "speq" / "experts" / digest
    except RuntimeError:
        return None


def kept_copy(checkpoint: Checkpoint, layout: ExpertLayout) -> PackedExpertStore | None:
    """The whole copy of a checkpoint's experts; None where there is none.

    A copy that is damaged is said to be, and begun anew.
    """
    folder = copy_folder(checkpoint)
    if folder is None or not (folder / EXPERTS_MANIFEST).exists():
        return None
    try:
        store = PackedExpertStore(folder, layout)
    except SpeqError as error:
        logger.warning("%s holds no sound copy of the experts, and is not read: %s", folder, error)
        with contextlib.suppress(OSError):
            (folder / EXPERTS_MANIFEST).unlink()
        return None
    if store.manifest.source == checkpoint.fingerprint():
        logger.info("experts are read from the packed copy in %s", folder)
        return store
    store.close()
    return None


def copied_codec(store: ExpertStore) -> ExpertCodec | None:
    """What a copy of these experts is in; None where there can be none, or it is not worth it."""
    shape = store.codec.shape
    count = store.num_layers * store.num_experts
    if not store.published or CODEC not in codecs_for(shape):
        return None
    return codec_of(CODEC, shape) if count * shape.nbytes >= LEAST_BYTES else None


class PackedCopy:
    """A copy in the making, by a thread of its own.

    store  the published experts; the copy reads them through files of its own
    """

    def __init__(self, checkpoint: Checkpoint, store: SafetensorsExpertStore, folder: Path) -> None:
        self.folder = folder
        self.total = store.num_layers * store.num_experts
        self.done = 0
        self._checkpoint, self._store = checkpoint, store
        self._packing = Packing(codec_of(CODEC, store.codec.shape))
        self._stopping = False
        self._alone = threading.Event()  # or stopping: either way there is nothing to rest for
        self._alone.set()
        self._begun_s = 0.0
        self._thread = threading.Thread(target=self._run, name="speq-packed-copy", daemon=True)

    @property
    def writing_bytes(self) -> int:
        """Memory that it takes: an expert's words, its record, and what is read beside them."""
        codec = self._packing.codec
        room = codec.shape.nbytes + usual_bytes(codec) + 2 * ALIGNMENT
        return room + self._store.reading_bytes

    @property
    def usual_bytes(self) -> int:
        """About what the copy takes of the disk."""
        return self.total * aligned(usual_bytes(self._packing.codec))

    def begin(self) -> None:
        """Start to write, and say so, where the disk has room."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            usage = shutil.disk_usage(self.folder)
        except OSError as error:
            logger.warning("no packed copy of the experts is made: %s", error)
            return
        room = usage.free - int(SPARE_SHARE * usage.total)
        if self.usual_bytes > room:
            logger.warning(
                "no packed copy of the experts is made: it takes %s, and the disk of %s has %s to "
                "spare; `speq pack` writes one elsewhere",
                format_bytes(self.usual_bytes),
                self.folder,
                format_bytes(max(room, 0)),
            )
            return
        logger.warning(
            "later runs will read experts faster: a packed copy is being made in %s, which takes "
            "%s; --packed-copy none makes none",
            self.folder,
            format_bytes(self.usual_bytes),
        )
        # A process may end without closing what it loaded, and must not end under a thread.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is written any more."""
        self._stopping = True
        self._alone.set()
        if self._thread.ident is not None:
            self._thread.join()
            atexit.unregister(self.stop)

    def wait(self) -> None:
        """Return when the copy is whole, or was given up."""
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Rest most of the time in this block, which generates tokens."""
        self._alone.clear()
        try:
            yield
        finally:
            self._alone.set()

    def _run(self) -> None:
        try:
            with taken(self.folder):
                self._write()
        except Stopped:
            logger.info("%d of %d experts are in the packed copy", self.done, self.total)
        except (SpeqError, OSError) as error:
            logger.warning("the packed copy of the experts is not finished: %s", error)

    def _write(self) -> None:
        self._begun_s = time.perf_counter()
        if (self.folder / EXPERTS_MANIFEST).exists():  # by another run meanwhile
            return
        source = self._checkpoint.fingerprint()
        ours = {EXPERTS_JOURNAL, EXPERTS_MANIFEST, RECORDS_FILE, LOCK}
        journal = Journal(
            self.folder / EXPERTS_JOURNAL, self._packing.named(source), ours.__contains__
        )
        self._packing.check_header(journal.header, source, self.folder)
        records, _ = write_records(self._store, self._packing, self.folder, journal, self._told)
        codec = self._packing.codec
        manifest = Manifest(
            codec=codec.name,
            dtype=dtype_name(codec.shape.dtype),
            hidden_size=codec.shape.hidden_size,
            expert_width=codec.shape.expert_width,
            num_layers=self._store.num_layers,
            num_experts=self._store.num_experts,
            source=source,
            records=tuple(records),
        )
        with replacing(self.folder / EXPERTS_MANIFEST) as file:
            file.write(manifest.to_json().encode())
        journal.path.unlink(missing_ok=True)
        logger.info("the packed copy of the experts is whole: the next run reads it")

    def _told(self, done: int, total: int) -> None:
        self.done = done
        self._alone.wait(REST * (time.perf_counter() - self._begun_s))
        if done < total and self._stopping:
            raise Stopped
        self._begun_s = time.perf_counter()


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Hold a folder, which two runs may not write to at once. Raises Stopped where one does."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stopped from None
        yield
