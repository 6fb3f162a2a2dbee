"""Experts of a packed copy: its source, and repair of damaged experts from the original.

source.json  the model that was copied, the CRC-32 of each expert's published weights, and the
             stamps of the model's files that are known to hold these weights
"""

import logging
import os
import threading
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

from torch import Tensor

from speq.errors import FileError, SpeqError
from speq.experts.codec import codec_of
from speq.experts.expert_store import ExpertLayout, SafetensorsExpertStore
from speq.experts.packed_store import PackedExpertStore
from speq.experts.record_writer import read_words, words_slot
from speq.files.alignment import allocate_aligned
from speq.files.atomic_file import replacing
from speq.files.checksums import seal
from speq.files.json_file import read_json
from speq.files.range_file import bytes_of
from speq.kernels.checksum import crc32_of

logger = logging.getLogger("speq")

SOURCE_FILE = "source.json"
FORMAT = "speq-copy-1"
# Most stamps that are kept: of the same model in several folders, or after moves.
MAX_STAMPS = 8


@dataclass(slots=True)
class CopySource:
    """Contents of source.json.

    model         folder of the model, without links
    fingerprint   of its checkpoint
    words_crc32s  of each expert's published weights, layer by layer; empty until the copy is
                  complete
    compared      by stamps of the model's files: how many experts, from the first, are known to be
                  the same in these files
    """

    model: str
    fingerprint: str
    words_crc32s: list[int] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    def holds(self, stamp: str) -> bool:
        """True if the copy is known to be of files with this stamp."""
        whole = len(self.words_crc32s)
        return bool(whole) and self.compared.get(stamp) == whole

    def note(self, stamp: str, compared: int) -> None:
        """Record how many experts of files with this stamp were compared."""
        self.compared.pop(stamp, None)
        self.compared[stamp] = compared
        for oldest in list(self.compared)[:-MAX_STAMPS]:
            del self.compared[oldest]

    def write(self, folder: Path) -> None:
        """Write source.json atomically. Raises OSError."""
        with replacing(folder / SOURCE_FILE) as file:
            file.write(dumps(seal({"format": FORMAT, **asdict(self)})).encode())

    @classmethod
    def of(cls, folder: Path) -> "CopySource":
        """Read source.json. Raises SpeqError if it is damaged, absent, or of another version."""
        path = folder / SOURCE_FILE
        entries = read_json(path, "the copy is made anew", "the copy is made anew")
        crc32 = entries.pop("crc32", None)
        if entries.get("format") != FORMAT or seal(entries)["crc32"] != crc32:
            raise FileError(f"{path} is damaged, or of another version: the copy is made anew")
        del entries["format"]
        return cls(**entries)


class CopiedExperts(PackedExpertStore):
    """Store of a copy's experts. A damaged or unreadable one is encoded again from the model and
    repaired in place.

    words   store of the model's published experts
    source  source of the copy

    Raises SpeqError if the model's weights have changed as well.
    """

    def __init__(
        self, folder: Path, layout: ExpertLayout, words: SafetensorsExpertStore, source: CopySource
    ) -> None:
        super().__init__(folder, layout)
        self.mended = 0
        self._words, self._source = words, source
        self._mending = threading.Lock()  # one at a time: it takes memory for an expert's weights
        if len(source.words_crc32s) != len(self.manifest.records):
            self.close()
            raise FileError(f"{folder / SOURCE_FILE} does not have as many experts as the copy")

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        try:
            return super().read(layer, expert, slot)
        except SpeqError as error:
            with self._mending:
                return self._mend(self._at(layer, expert), slot, error)

    def _mend(self, at: int, slot: Tensor, reason: SpeqError) -> int:
        """Fill `slot` with an expert encoded from the model's weights. Return the bytes read."""
        wanted = self.manifest.records[at]
        words = words_slot(self._words)
        if read_words(self._words, at, words) != self._source.words_crc32s[at]:
            raise FileError(
                f"{self._file.path} holds a damaged record of {self._describe(at)}, and the "
                f"model in {self._source.model} has other weights now than the copy was made of; "
                "start again, which makes the copy anew"
            ) from reason
        codec = codec_of(self.manifest.codec, self.manifest.shape)
        room = allocate_aligned(1, codec.slot_bytes)[0]
        record = room[: codec.encode(self._words.codec.decode(words), None, room)]
        if record.nbytes != wanted.nbytes or crc32_of(record) != wanted.crc32:
            raise FileError(
                f"{self._file.path} holds a damaged record of {self._describe(at)} and was written "
                "by a version of speq that encodes it otherwise; `speq cache clear` removes it"
            ) from reason
        slot[: record.nbytes].copy_(record)
        done = "mended" if self._write(wanted.offset, record) else "could not be mended"
        if not self.mended:  # the first of perhaps many
            logger.warning(
                "%s: the record of %s was not what was written; it was read from the model, and "
                "%s: look after the disk",
                self._file.path,
                self._describe(at),
                done,
            )
        self.mended += 1
        return words.nbytes

    def _write(self, offset: int, record: Tensor) -> bool:
        """Write a packed expert in place. Return True if that succeeded.

        Concurrent readers compare checksums, and concurrent writers write the same bytes.
        """
        try:
            descriptor = os.open(self._file.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(descriptor).st_ino != self._file.stamp()[1]:
                return False  # the copy was made anew meanwhile
            data: Any = bytes_of(record)
            while data:
                count = os.pwrite(descriptor, data, offset)
                data, offset = data[count:], offset + count
            os.fsync(descriptor)
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self.mended > 1:
            logger.warning("%s: %d records were not what was written", self._file.path, self.mended)
            self.mended = 0
        super().close()
