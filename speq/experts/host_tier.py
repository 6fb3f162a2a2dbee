"""Host tier: exact experts in host memory, for devices with memory of their own.

Each expert is read once, and encoded if requested. If the host has too little memory for all, the
rest stay on disk and are loaded through free host slots.
"""

import ctypes
import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from speq.devices.device import Accelerator
from speq.errors import NoRoom, SpeqError
from speq.experts.codec import ExpertCodec
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore
from speq.experts.int4 import Int4Arena
from speq.experts.passes import for_each_key, spread_by_layer
from speq.experts.pinned_arena import CHUNK_BYTES, PinnedArena
from speq.units import Done, format_bytes

logger = logging.getLogger("speq")

# Host slots besides one per reader, if experts come from disk: one is filled and one copied.
SPARE_RECORDS = 2


def fewest_records(readers: int, num_experts: int) -> int:
    """Fewest host slots with which loads from disk do not wait for each other.

    num_experts  of all layers; more slots than these are of no use
    """
    return min(readers + SPARE_RECORDS, num_experts)


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory that experts may take.

    limit_bytes  of host slots; readers: threads that fill them
    chunk_bytes  locked at a time
    """

    device: Accelerator
    limit_bytes: int
    readers: int
    chunk_bytes: int = CHUNK_BYTES


class HostTier:
    """Packed experts in host memory that a device copies from.

    contents  (layer, expert) of the first host slots, as filled; the rest are free
    resident  whether all experts are held, so that nothing is read from disk
    """

    def __init__(self, store: ExpertStore, room: HostRoom) -> None:
        self._store = store
        self._arena = PinnedArena(room.device, room.limit_bytes, room.chunk_bytes)
        self._records: list[Tensor] = []
        self.contents: list[tuple[int, int]] = []

    @classmethod
    def load(cls, store: ExpertStore, room: HostRoom, progress: Done | None = None) -> "HostTier":
        """Load experts as they are on disk, into slots for the largest.

        Raises SpeqError for experts that cannot be read, and if too few fit.
        """
        slot_bytes = store.codec.slot_bytes
        chunk_bytes = max(room.chunk_bytes // slot_bytes, 1) * slot_bytes
        tier = cls(store, HostRoom(room.device, room.limit_bytes, room.readers, chunk_bytes))
        with ExitStack() as undo:
            undo.callback(tier.close)
            tier._take_slots(slot_bytes)
            tier._free_some(room)
            number = {key: at for at, key in enumerate(tier.contents)}

            def read(layer: int, expert: int) -> None:
                store.read(layer, expert, tier.record(number[layer, expert]))

            for_each_key(read, sorted(tier.contents), room.readers, progress)
            tier._say()
            undo.pop_all()
        return tier

    @classmethod
    def encode(
        cls,
        store: EncodingStore,
        base: Int4Arena | None,
        room: HostRoom,
        progress: Done | None = None,
    ) -> "HostTier":
        """Load published experts, packed by the store's codec; this pass determines their sizes.

        Packed experts are contiguous, each in as many blocks as it needs, if all fit. Otherwise
        they are moved to slots for the largest, once it is known, so that others can replace them.

        base  see `EncodingStore.sample`. Raises as `load` does.
        """
        tier = cls(store, room)
        with ExitStack() as undo:
            undo.callback(tier.close)
            tier._encode(store, base, room, progress)
            if not tier.resident:
                tier._lay_out_for(store.codec.slot_bytes)
                tier._free_some(room)
            tier._say()
            undo.pop_all()
        return tier

    def _take_slots(self, slot_bytes: int) -> None:
        for key in spread_by_layer(self._store.num_layers, self._store.num_experts):
            left = self._count - len(self._records)
            record = self._arena.take(slot_bytes, left * slot_bytes)
            if record is None:
                return
            self._records.append(record)
            self.contents.append(key)

    def _encode(
        self, store: EncodingStore, base: Int4Arena | None, room: HostRoom, progress: Done | None
    ) -> None:
        turn, expected_bytes = threading.Lock(), store.usual_bytes

        def keep(layer: int, expert: int, record: Tensor) -> None:
            with turn:
                left = self._count - len(self._records)
                held = self._arena.take(len(record), left * expected_bytes)
                if held is None:
                    return
                self._records.append(held)
                self.contents.append((layer, expert))
            held.copy_(record)

        keys = spread_by_layer(store.num_layers, store.num_experts)
        store.measure(base, room.readers, progress, keys, keep)

    def _lay_out_for(self, slot_bytes: int) -> None:
        """Move contiguous experts apart, so that each has room for the largest. Those without a
        place are dropped.
        """
        held = dict(zip(self.contents, self._records, strict=True))
        filled: list[tuple[tuple[int, int], Tensor]] = []
        free: list[Tensor] = []
        for chunk in self._arena.chunks:
            start = chunk.data_ptr()
            inside = {
                key: record
                for key, record in held.items()
                if start <= record.data_ptr() < start + chunk.nbytes
            }
            places = [
                chunk[at : at + slot_bytes]
                for at in range(0, chunk.nbytes - slot_bytes + 1, slot_bytes)
            ]
            moved = list(zip(inside.items(), places, strict=False))
            # Each moves to a higher address, so moving the last one first overwrites none.
            for (_, record), place in reversed(moved):
                ctypes.memmove(place.data_ptr(), record.data_ptr(), len(record))
            filled += [(key, place) for (key, _), place in moved]
            free += places[len(moved) :]
        self.contents = [key for key, _ in filled]
        self._records = [place for _, place in filled] + free

    def _free_some(self, room: HostRoom) -> None:
        """Free slots for experts that are read from disk, unless all are held.

        Raises SpeqError if there are too few.
        """
        if self.resident:
            return
        fewest = fewest_records(room.readers, self._count)
        if self.num_records < fewest:
            raise too_small_error(room.limit_bytes, fewest, self.codec.slot_bytes)
        del self.contents[max(self.num_records - fewest, 0) :]

    def _say(self) -> None:
        held = len(self.contents)
        if not self.resident:
            logger.warning(
                "%d of %d experts are held in %s of host memory; the other %d stay on disk and "
                "come through it, which is slower; a larger host_budget holds more",
                held,
                self._count,
                format_bytes(self.nbytes),
                self._count - held,
            )
        if self.pinned_bytes < self.nbytes:
            logger.warning(
                "the system did not lock %s of the %s of host memory that experts take (%.0f %%): "
                "copies of experts there are slower; a smaller host_budget may be locked whole",
                format_bytes(self.nbytes - self.pinned_bytes),
                format_bytes(self.nbytes),
                100 * (1 - self.pinned_bytes / self.nbytes),
            )

    @property
    def _count(self) -> int:
        return self._store.num_layers * self._store.num_experts

    @property
    def resident(self) -> bool:
        return len(self.contents) == self._count

    @property
    def codec(self) -> ExpertCodec:
        return self._store.codec

    @property
    def num_records(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Host memory of all slots."""
        return self._arena.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of it that the system locked."""
        return self._arena.pinned_bytes

    def record(self, at: int) -> Tensor:
        """Memory of a host slot: [slot_bytes] uint8, or only its expert's bytes if all are held."""
        return self._records[at]

    def record_bytes(self, layer: int, expert: int) -> int:
        """Bytes of a packed expert, which a copy to the device moves."""
        return self._store.record_bytes(layer, expert)

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        """Read an expert from disk into a host slot [slot_bytes] uint8. Returns the bytes read.

        Threads may read into different slots at the same time.
        """
        return self._store.read(layer, expert, record)

    def close(self) -> None:
        """Unlock and free the memory."""
        self._records.clear()
        self.contents.clear()
        self._arena.close()


def too_small_error(limit_bytes: int, records: int, record_bytes: int) -> SpeqError:
    """Error for a host budget that leaves too little for experts that come from disk."""
    short_bytes = records * record_bytes - max(limit_bytes, 0)
    return NoRoom(
        f"the host budget leaves {format_bytes(max(limit_bytes, 0))} for exact experts, and at "
        f"least {records} of {format_bytes(record_bytes)} each are held at a time; give a "
        f"host_budget that is larger by {short_bytes} bytes ({format_bytes(short_bytes)})"
    )
