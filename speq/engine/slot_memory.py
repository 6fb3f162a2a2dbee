"""Takes the memory of expert slots from the system beside what runs."""

import threading
from weakref import ref

from torch import Tensor

from speq.files.alignment import populate
from speq.scheduler.expert_cache import ExpertCache

# At a time. Who stops it waits for so much, and so does a thread that maps other memory.
STEP_BYTES = 8 << 20


class SlotMemory:
    """The memory of slots [S, slot_bytes] in the host. A virtual machine may be given it at a
    fraction of a disk's rate, so no prompt waits for all of it.

    taken  the first slots, whose memory is there
    cache  is told how many they have become
    """

    def __init__(self, slots: Tensor, taken: int, cache: ExpertCache) -> None:
        self._count, self._cache = len(slots), cache
        self._taking = threading.Lock()
        cache.present = taken
        if taken < self._count:
            name = "speq-slot-memory"
            threading.Thread(target=_take, args=(slots, ref(self)), name=name, daemon=True).start()

    def take(self, slots: Tensor) -> bool:
        """Take the next part, over which experts may be read meanwhile; False after the last."""
        with self._taking:
            begin = self._cache.present
            if begin < self._count:
                end = begin + max(STEP_BYTES // slots.shape[1], 1)
                populated = populate(slots[begin:end])
                self._cache.present = min(end, self._count) if populated else self._count
            return self._cache.present < self._count

    def leave(self) -> None:
        """Take no more: the rest comes when experts are read into it. Nothing is being taken when
        this returns, so that memory can be given back.
        """
        with self._taking:
            self._cache.present = self._count


def _take(slots: Tensor, memory: "ref[SlotMemory]") -> None:
    """Take all of it, as long as somebody has the slots."""
    while (held := memory()) is not None and held.take(slots):
        del held
