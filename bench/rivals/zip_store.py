"""A store that fills slots with words, from compressed experts in a file and in a pool."""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from torch import Tensor

from speq.bench.rivals.zip_file import Chunk, ZipFile
from speq.bench.rivals.zip_planes import INFLATING_BYTES, Inflater, Words
from speq.bench.rivals.zip_pool import RecordPool
from speq.errors import SpeqError
from speq.experts.codec import RawCodec
from speq.experts.expert_store import ExpertStore
from speq.experts.packed_draft import TiedDraft
from speq.files.alignment import ALIGNMENT, align, allocate_aligned
from speq.files.range_file import bytes_of

# Read before the first chunks are inflated, while the next ones come.
SPAN_BYTES = 2 << 20


class ZipStore:
    """An ExpertStore of raw slots. A record that is read is compared with its checksum the first
    time. Raises SpeqError where one is damaged.

    words       the published experts, whose file it is
    pool_bytes  what the pool takes at most
    threads     that inflate, beside those that read
    """

    published = False

    def __init__(self, words: ExpertStore, folder: Path, pool_bytes: int, threads: int) -> None:
        self.num_layers, self.num_experts = words.num_layers, words.num_experts
        self._codec = RawCodec(words.codec.shape)
        self.file = ZipFile(folder)
        self._cell_bytes = self.file.cell_bytes
        # A cell to read into; and what inflates, as if each reader had threads of its own.
        self.reading_bytes = self._cell_bytes + ALIGNMENT + threads * INFLATING_BYTES
        count = max(pool_bytes - ALIGNMENT, 0) // self._cell_bytes
        count = min(count, len(self.file.records))
        self.pool_bytes = count and count * self._cell_bytes + ALIGNMENT
        cells = allocate_aligned(count, self._cell_bytes)
        cells.zero_()  # takes the memory now
        self.pool = RecordPool(list(cells))
        self._workers = ThreadPoolExecutor(threads, "speq-inflater")
        # As many as threads ever read, and inflate, at a time.
        self._cells: SimpleQueue[Tensor] = SimpleQueue()
        self._inflaters: SimpleQueue[Inflater] = SimpleQueue()
        self._compared: set[int] = set()

    @property
    def codec(self) -> RawCodec:
        return self._codec

    @property
    def source(self) -> ExpertStore:
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file.data.path,)

    @property
    def tied_draft(self) -> TiedDraft | None:
        return None

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._codec.record_bytes

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self.file.records[layer * self.num_experts + expert].nbytes

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        key, at = (layer, expert), layer * self.num_experts + expert
        cell = self.pool.take(key)
        if cell is not None:
            try:
                with self._filling(at, cell, slot) as arrived:
                    arrived(self.file.records[at].nbytes)
            finally:
                self.pool.give_back(key, cell)
            return 0
        try:
            cell = self._cells.get_nowait()
        except Empty:
            cell = allocate_aligned(1, self._cell_bytes)[0]
        try:
            with self._filling(at, cell, slot) as arrived:
                read_bytes = self._read(at, cell, arrived)
            cell = self.pool.offer(key, cell)
        finally:
            self._cells.put(cell)
        return read_bytes

    def _read(self, at: int, cell: Tensor, arrived: Callable[[int], None]) -> int:
        """Read a record into a cell; bytes read. arrived: told of its bytes so far"""
        record, data = self.file.records[at], self.file.data
        compare = at not in self._compared
        read_bytes = crc32 = 0
        for start in range(0, record.nbytes, SPAN_BYTES):
            end = min(start + SPAN_BYTES, record.nbytes)
            span = cell[start : align(end)]
            read_bytes += data.read_aligned(record.offset + start, end - start, span)
            arrived(end)
            if compare:
                crc32 = zlib.crc32(bytes_of(cell[start:end]), crc32)
        if compare and crc32 != record.crc32:
            raise self._damaged(at)
        self._compared.add(at)
        return read_bytes

    @contextmanager
    def _filling(self, at: int, cell: Tensor, slot: Tensor) -> Iterator[Callable[[int], None]]:
        """Fill a slot from a record that the block brings into `cell`, and tells of as it does.

        Nobody is at work on the memory of either when the block has ended.
        """
        words: Words = np.frombuffer(bytes_of(slot)[: self._codec.record_bytes], np.uint16)
        chunks = deque(self.file.records[at].chunks(len(words)))
        futures: list[Future[None]] = []

        def arrived(nbytes: int) -> None:
            while chunks and chunks[0].end <= nbytes:
                futures.append(
                    self._workers.submit(self._inflate, at, chunks.popleft(), cell, words)
                )

        try:
            yield arrived
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _inflate(self, at: int, chunk: Chunk, cell: Tensor, words: Words) -> None:
        """Fill an expert's words with one of its chunks, in a worker's thread."""
        try:
            inflater = self._inflaters.get_nowait()
        except Empty:
            inflater = Inflater()
        record = bytes_of(cell)
        try:
            signs = np.frombuffer(record[chunk.signs], np.uint8)
            inflater.join(record[chunk.compressed], signs, words[chunk.words])
        except ValueError as error:
            raise self._damaged(at) from error
        finally:
            self._inflaters.put(inflater)

    def _damaged(self, at: int) -> SpeqError:
        return self.file.damaged(*divmod(at, self.num_experts), self.file.records[at])

    def close(self) -> None:
        """Give back the file, the pool's memory and all threads."""
        self._workers.shutdown()
        self.file.data.close()
        self.pool = RecordPool([])
        self._cells = SimpleQueue()
