"""A file of experts in ZipMoE's representation, which a model's experts are written to once.

zipmoe.json  the index: each expert's place, checksum, and the sizes of its compressed chunks
zipmoe.bin   an expert after the other, each at a multiple of 4,096 bytes: chunk after chunk, its
             exponents under ZSTD, then its signs and mantissas
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speq.bench.rivals.zip_planes import CHUNK_WORDS, Deflater
from speq.errors import FileError, OptionError, SpeqError
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, expert_slot
from speq.experts.passes import map_in_order
from speq.experts.record_writer import BATCH_BYTES, sync
from speq.files.alignment import align
from speq.files.atomic_file import replacing, write_whole, writing
from speq.files.checksums import seal
from speq.files.json_file import read_json
from speq.files.range_file import RangeFile, bytes_of
from speq.units import Done

INDEX_FILE, DATA_FILE = "zipmoe.json", "zipmoe.bin"
FORMAT = "speq-zipmoe-1"


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """An expert's place in the file, the CRC-32 of its bytes, and what each chunk's exponents take.

    The planes of signs and mantissas are as long as chunks have words.
    """

    offset: int
    nbytes: int
    crc32: int
    compressed_bytes: tuple[int, ...]

    def chunks(self, words: int) -> Iterator["Chunk"]:
        """Those of an expert of so many words."""
        start = 0
        for at, size in enumerate(self.compressed_bytes):
            first = at * CHUNK_WORDS
            last = min(first + CHUNK_WORDS, words)
            chunk = Chunk(slice(start, start + size), start + size + last - first, first)
            yield chunk
            start = chunk.end


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a chunk lies in its record: its exponents, and behind them its signs, up to `end`.

    first_word  of the expert's that it fills
    """

    compressed: slice
    end: int
    first_word: int

    @property
    def signs(self) -> slice:
        return slice(self.compressed.stop, self.end)

    @property
    def words(self) -> slice:
        return slice(self.first_word, self.first_word + self.end - self.compressed.stop)


def ensure_file(
    source: ExpertStore, fingerprint: str, folder: Path, threads: int, progress: Done | None = None
) -> None:
    """Write the experts of a published model, unless the folder has those of the same one.

    fingerprint  of the checkpoint

    Raises SpeqError where experts are no BF16 words as published, or the folder takes no files.
    """
    if not isinstance(source, SafetensorsExpertStore):
        raise OptionError(
            "the system zipmoe compresses experts as they were published and the model is packed; "
            "give the folder that it was packed from"
        )
    if source.codec.shape.dtype != torch.bfloat16:
        raise OptionError(
            f"the system zipmoe splits words of bfloat16 and the model's experts are "
            f"{str(source.codec.shape.dtype).removeprefix('torch.')}; leave zipmoe out"
        )
    path = folder / INDEX_FILE
    if path.exists() and read_index(path).get("source") == fingerprint:
        return
    with writing(path):
        path.unlink(missing_ok=True)  # what it tells of is about to go
    records = write_records(source, folder / DATA_FILE, threads, progress)
    entries = {
        "format": FORMAT,
        "source": fingerprint,
        "chunk_words": CHUNK_WORDS,
        "records": [astuple(record) for record in records],
    }
    write_whole(path, (json.dumps(seal(entries)) + "\n").encode())


def read_index(path: Path) -> dict[str, Any]:
    """The entries of an index; none of one that another version wrote. Raises SpeqError for what
    nobody wrote.
    """
    remedy = f"remove {path} and run again"
    entries = read_json(path, remedy, remedy)
    written = {name: value for name, value in entries.items() if name != "crc32"}
    if seal(written) != entries:
        raise FileError(f"{path} is not what was written; remove it and run again")
    ours = entries.get("format") == FORMAT and entries.get("chunk_words") == CHUNK_WORDS
    return entries if ours else {}


def write_records(
    source: SafetensorsExpertStore, path: Path, threads: int, progress: Done | None
) -> list[ZipRecord]:
    """Write all experts' records, whole or not at all."""
    total = source.num_layers * source.num_experts
    tools: SimpleQueue[tuple[Deflater, Tensor]] = SimpleQueue()
    for _ in range(threads):
        tools.put((Deflater(), expert_slot(source)))

    def make(at: int) -> tuple[bytes, tuple[int, ...]]:
        deflater, slot = tools.get()
        try:
            source.read(*divmod(at, source.num_experts), slot)
            words = np.frombuffer(bytes_of(slot)[: source.codec.record_range[1]], np.uint16)
            chunks = list(deflater.chunks(words))
            record = b"".join(
                part for compressed, signs in chunks for part in (compressed, signs.data)
            )
            return record, tuple(len(compressed) for compressed, _ in chunks)
        finally:
            tools.put((deflater, slot))

    records: list[ZipRecord] = []
    with writing(path), replacing(path) as file:
        written = synced = 0
        with closing(map_in_order(make, range(total), threads)) as making:
            for record, sizes in making:
                records.append(ZipRecord(written, len(record), zlib.crc32(record), sizes))
                file.write(record)
                file.write(bytes(align(len(record)) - len(record)))
                written += align(len(record))
                if written - synced >= BATCH_BYTES:
                    sync(file)
                    synced = written
                if progress is not None:
                    progress(len(records), total)
        sync(file)
    return records


class ZipFile:
    """The file that `ensure_file` wrote. Raises SpeqError where it is another."""

    def __init__(self, folder: Path) -> None:
        self.index_path = folder / INDEX_FILE
        entries = read_index(self.index_path)
        self.records = [
            ZipRecord(offset, nbytes, crc32, tuple(sizes))
            for offset, nbytes, crc32, sizes in entries["records"]
        ]
        self.data = RangeFile(folder / DATA_FILE)
        wanted = max(align(record.offset + record.nbytes) for record in self.records)
        if self.data.size != wanted:
            self.data.close()
            raise FileError(
                f"{self.data.path} has {self.data.size} bytes and its index says {wanted}; remove "
                f"{self.index_path} and run again"
            )

    @property
    def record_bytes(self) -> int:
        """Of all records together."""
        return sum(record.nbytes for record in self.records)

    @property
    def cell_bytes(self) -> int:
        """What a record takes in memory: the largest, in whole blocks."""
        return align(max(record.nbytes for record in self.records))

    def damaged(self, layer: int, expert: int, record: ZipRecord) -> SpeqError:
        return FileError(
            f"{self.data.path}: expert {expert} in MoE layer {layer}, {record.nbytes} bytes at "
            f"{record.offset}, is not what was written; remove {self.index_path} and run again, "
            "and look after the disk"
        )
