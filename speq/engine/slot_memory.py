"""Takes the memory of expert slots from the system beside what runs."""

import threading
from weakref import ref

from torch import Tensor

from speq.files.alignment import populate
from speq.scheduler.expert_cache import ExpertCache

# At a time. Who stops it waits for so much, and so does a thread that maps other memory.
PIECE_BYTES = 8 << 20


class SlotMemory:
    """The memory of slots [S, slot_bytes] in the host. A virtual machine may be given it at a
    fraction of a disk's rate, so no prompt waits for all of it.

    taken  the first slots, whose memory is there
    cache  is told how many they have become
    left   set when no more is to be taken
    """

    def __init__(self, slots: Tensor, taken: int, cache: ExpertCache) -> None:
        self._count, self._cache = len(slots), cache
        self._taking = threading.Lock()
        self.left = threading.Event()
        cache.present = taken
        if taken < self._count:
            name = "speq-slot-memory"
            threading.Thread(target=_take, args=(slots, ref(self)), name=name, daemon=True).start()

    def take(self, slots: Tensor) -> bool:
        """Take the next slot, over which an expert may be read meanwhile; False if none is left."""
        with self._taking:
            at = self._cache.present
            if at == self._count:
                return False
            for piece in slots[at].split(PIECE_BYTES):
                if self.left.is_set():
                    return False
                if not populate(piece):
                    self._cache.present = self._count
                    return False
            self._cache.present = at + 1
            return True

    def leave(self) -> None:
        """Take no more: the rest comes when experts are read into it. Nothing is being taken when
        this returns, so that memory can be given back.
        """
        self.left.set()
        with self._taking:
            self._cache.present = self._count


def _take(slots: Tensor, memory: "ref[SlotMemory]") -> None:
    """Take all of it, as long as somebody has the slots."""
    while (held := memory()) is not None and held.take(slots):
        del held
