"""A file of records on two disks, each record read from the one that will have it sooner.

`speq pack --mirror` writes the second file and `mirror.json`, which names it, beside the first.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError, NoRoom, SpeqError
from speq.files.atomic_file import make_folder, remove_abandoned, replacing, write_whole, writing
from speq.files.json_file import read_json
from speq.files.range_file import RangeFile, bytes_of
from speq.units import Clock, Progress, format_bytes, track

logger = logging.getLogger("speq")

MIRROR_FILE, MIRROR_FORMAT = "mirror.json", 1
COPY_BYTES = 16 << 20
# Share of what is known of a disk's speed that each further read leaves.
KEPT = 0.98


@dataclass(slots=True)
class DiskLoad:
    """What a disk has to do, and its speed of late.

    reads, asked_bytes  under way
    read_bytes, busy_s  read, and time with any read under way; older ones count less
    since_s             until when busy_s counts, while reads are under way
    """

    reads: int = 0
    asked_bytes: int = 0
    read_bytes: float = 0.0
    busy_s: float = 0.0
    since_s: float = 0.0

    def begin(self, nbytes: int, now_s: float) -> None:
        if not self.reads:
            self.since_s = now_s
        self.reads += 1
        self.asked_bytes += nbytes

    def end(self, nbytes: int, now_s: float) -> None:
        self.reads -= 1
        self.asked_bytes -= nbytes
        self.read_bytes = KEPT * self.read_bytes + nbytes
        self.busy_s = KEPT * self.busy_s + now_s - self.since_s
        self.since_s = now_s

    @property
    def bytes_per_s(self) -> float | None:
        """None: nothing is known of it yet."""
        return self.read_bytes / self.busy_s if self.busy_s > 0 else None


class DiskLoads:
    """Divides reads among disks, by what each has to do and how fast it was. Threads may ask.

    lost  disks that failed
    """

    def __init__(self, count: int, clock: Clock = time.perf_counter) -> None:
        self._loads = [DiskLoad() for _ in range(count)]
        self._clock = clock
        self._lock = threading.Lock()
        self.lost: set[int] = set()

    def begin(self, nbytes: int) -> int:
        """The disk that a read of so many bytes begins on."""
        with self._lock:
            known = [load.bytes_per_s for load in self._loads]
            usual = max((rate for rate in known if rate is not None), default=1.0)

            def done_s(at: int) -> tuple[float, bool]:
                after_s = (self._loads[at].asked_bytes + nbytes) / (known[at] or usual)
                return after_s, known[at] is not None  # of two alike the unknown one is tried

            at = min((at for at in range(len(known)) if at not in self.lost), key=done_s)
            self._loads[at].begin(nbytes, self._clock())
            return at

    def end(self, at: int, nbytes: int) -> None:
        """A read has ended."""
        with self._lock:
            self._loads[at].end(nbytes, self._clock())

    def lose(self, at: int) -> bool:
        """Begin no more reads on a disk; False if it is the last one."""
        with self._lock:
            if len(self.lost | {at}) == len(self._loads):
                return False
            self.lost.add(at)
            return True


class MirroredRecords:
    """Reads of one file of records that lies on several disks. Threads may read at the same time.

    A disk that fails is given up for the run, as long as there is another one.
    """

    def __init__(self, files: Sequence[RangeFile]) -> None:
        self.files, self.loads = files, DiskLoads(len(files))

    def read(
        self, offset: int, nbytes: int, slot: Tensor, check: Callable[[RangeFile], None]
    ) -> int:
        """Read a record into `slot`, as `RangeFile.read_aligned`. Return the bytes read.

        check  told which file it was read from; raises SpeqError if it is not what was packed
        """
        while True:
            at = self.loads.begin(nbytes)
            try:
                read_bytes = self.files[at].read_aligned(offset, nbytes, slot)
                check(self.files[at])
                return read_bytes
            except SpeqError as error:
                known = at in self.loads.lost
                if not self.loads.lose(at):
                    raise
                if not known:
                    path = self.files[at].path
                    logger.warning(
                        "experts are read from one disk: %s is left out: %s", path, error
                    )
            finally:
                self.loads.end(at, nbytes)

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_mirror(folder: Path, size: int) -> RangeFile | None:
    """Open the second file of a pack's records, of so many bytes; None if the pack has none, or if
    it cannot be used, which is said.
    """
    named = folder / MIRROR_FILE
    if not named.exists():
        return None
    try:
        entries = read_json(named, "pack the model again with --mirror")
        if entries.get("format") != MIRROR_FORMAT or not isinstance(entries.get("records"), str):
            raise FileError(f"{named} names no mirror; pack the model again with --mirror")
        file = RangeFile(Path(entries["records"]))
        if file.size != size:
            file.close()
            raise FileError(f"{file.path} has {file.size} bytes and the pack's records {size}")
        return file
    except SpeqError as error:
        logger.warning("experts are read from one disk: %s", error)
        return None


def write_mirror(records: Path, mirror: Path, progress: Progress) -> None:
    """Copy a pack's file of records to the folder `mirror`, and have runs read from both.

    Raises SpeqError if the disk is full or cannot be written.
    """
    make_folder(mirror)
    copy = (mirror / records.name).resolve()
    with RangeFile(records) as file, writing(mirror):
        if copy == records.resolve():
            raise FileError(f"{mirror} is the pack's own folder; give one on another disk")
        free = shutil.disk_usage(mirror).free
        if file.size > free:
            raise NoRoom(
                f"the mirror takes {format_bytes(file.size)} and {format_bytes(free)} are free at "
                f"{mirror}; free some, or give a folder on another disk"
            )
        if os.stat(mirror).st_dev == os.stat(records).st_dev:
            logger.warning("%s is on the same disk as the pack: reads get no faster", mirror)
        remove_abandoned(mirror)
        block = torch.empty(COPY_BYTES, dtype=torch.uint8)
        starts = range(0, file.size, COPY_BYTES)
        with replacing(copy) as target:
            for start in track("writing the mirror", starts, len(starts), progress):
                part = block[: min(COPY_BYTES, file.size - start)]
                file.read_into(start, part)
                target.write(bytes_of(part))
    content = {"format": MIRROR_FORMAT, "records": str(copy)}
    named = records.with_name(MIRROR_FILE)
    write_whole(named, (json.dumps(content, indent=1) + "\n").encode())
