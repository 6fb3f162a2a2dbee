"""A pack's experts divided between two disks, so that one model takes both and reads go to both.

`speq pack --stripe` writes each record to one of two folders, in proportion to what their disks
read a second. `stripe.json` in the second folder names the pack that its records are of.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from speq.errors import FileError, SpeqError
from speq.files.alignment import ALIGNMENT
from speq.files.atomic_file import make_folder, remove_abandoned, write_whole, writing
from speq.files.json_file import read_json
from speq.files.plain_reads import bytes_per_s_of
from speq.files.range_file import RangeFile

logger = logging.getLogger("speq")

STRIPE_FILE, STRIPE_FORMAT = "stripe.json", 1
# Shares of records are in thousandths.
WHOLE = 1000
# What is written to a disk and read again to measure it: at most, and at a time.
PROBE_BYTES, PROBE_READ_BYTES, PROBE_READERS = 256 << 20, 4 << 20, 4


@dataclass(frozen=True, slots=True)
class Stripe:
    """The second folder of a pack's records, and the pack's name in its `stripe.json`."""

    folder: Path
    pack_id: str

    @classmethod
    def to(cls, folder: Path) -> "Stripe":
        """A stripe of a pack that is begun."""
        return cls(folder.resolve(), uuid4().hex)

    @classmethod
    def of(cls, entry: Any) -> "Stripe":
        """Raises ValueError for an entry that is none."""
        if not isinstance(entry, list) or [type(each) for each in entry] != [str, str]:
            raise ValueError(f"{entry!r} is not a stripe")
        return cls(Path(entry[0]), entry[1])

    def entry(self) -> list[str]:
        return [str(self.folder), self.pack_id]

    def claim(self, begun: bool) -> None:
        """Have the folder be this pack's. Raises SpeqError if it is another's.

        begun  whether records were written there: a folder without them is then another disk's
        """
        named = self.folder / STRIPE_FILE
        if begun or named.exists():
            self.check()
            remove_abandoned(self.folder)
        else:
            check_empty(self.folder)
            content = {"format": STRIPE_FORMAT, "pack": self.pack_id}
            write_whole(named, (json.dumps(content) + "\n").encode())

    def check(self) -> None:
        """Raise SpeqError unless the folder is of this pack."""
        named = self.folder / STRIPE_FILE
        instead = f"mount the disk of {self.folder} with what was packed to it, or pack anew"
        content = read_json(named, "remove the folder", instead)
        if content.get("format") != STRIPE_FORMAT or content.get("pack") != self.pack_id:
            raise FileError(f"{named} is of another pack; give another folder, or remove it")

    def open(self, name: str, size: int) -> RangeFile:
        """Open the file of records, of so many bytes. Raises SpeqError if it is not this pack's."""
        try:
            self.check()
            file = RangeFile(self.folder / name)
            if file.size != size:
                file.close()
                raise FileError(f"{file.path} has {file.size} bytes and its manifest says {size}")
        except SpeqError as error:
            reason = str(error).partition(";")[0]
            raise FileError(
                f"a part of the pack's experts cannot be read: {reason}; mount the disk of "
                f"{self.folder} with what was packed to it, or pack the model again"
            ) from error
        return file


def check_empty(folder: Path) -> None:
    """Raise SpeqError unless nothing is in a folder, which is made if it is not there."""
    make_folder(folder)
    remove_abandoned(folder)
    with writing(folder):
        if any(folder.iterdir()):
            raise FileError(
                f"{folder} exists and holds other files; give a folder that is not there yet"
            )


def measured_rates(folders: Sequence[Path], nbytes: int) -> list[float]:
    """What each of two folders' disks reads, in bytes a second.

    nbytes  to be packed: no more is read, but a block at least
    """
    nbytes = max(min(PROBE_BYTES, nbytes) // ALIGNMENT, 1) * ALIGNMENT
    rates = []
    for folder in folders:
        with writing(folder):
            size = min(PROBE_READ_BYTES, nbytes)
            rates.append(bytes_per_s_of(folder, nbytes, size, PROBE_READERS))
    first, second = (os.stat(folder).st_dev for folder in folders)
    if first == second:
        logger.warning("%s is on the same disk as the pack: reads get no faster", folders[1])
    return rates


def share_of(rates: Sequence[float]) -> int:
    """Thousandths of the records that the second of two disks gets, so that both end together."""
    return round(WHOLE * rates[1] / sum(rates))


def disk_of(at: int, share: int) -> int:
    """The disk of record `at`, 0 or 1. Those of a layer are consecutive, and so spread evenly: of
    any n of them the second disk has its share, give or take one.
    """
    return (at + 1) * share // WHOLE - at * share // WHOLE
