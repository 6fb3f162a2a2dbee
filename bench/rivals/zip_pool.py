"""A pool of compressed experts in memory, behind a cache of whole ones.

It is asked for what is not in a slot. By least recent use it would hold what slots just took, so
the expert that was asked for the fewest times leaves first, and the least recent of those. In
routes of the bundled model, with a third of a cache of 46 % of its experts given to the pool, that
answers 36 % of what slots do not hold, and least recent use 6 %.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

Key = tuple[int, int]


@dataclass(slots=True)
class RecordPool:
    """Records by (layer, expert), in cells of equal size, which change hands and are never copied.

    A reader keeps a cell of its own. It gives the pool the cell that it read a record into, and
    gets another for it. A record is lent to one reader at a time. Threads may call at once.

    free   cells that hold no record
    asked  times that each record was asked for
    """

    free: list[Tensor]
    asked: Counter[Key] = field(default_factory=Counter, init=False)
    _held: OrderedDict[Key, Tensor] = field(default_factory=OrderedDict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self, key: Key) -> Tensor | None:
        """The cell of a record, which is to be given back; None where the pool has it not."""
        with self._lock:
            self.asked[key] += 1
            return self._held.pop(key, None)

    def give_back(self, key: Key, cell: Tensor) -> None:
        """Give a cell back that was taken, its record still in it."""
        with self._lock:
            if key in self._held:  # somebody else read it meanwhile
                self.free.append(cell)
            else:
                self._held[key] = cell

    def offer(self, key: Key, cell: Tensor) -> Tensor:
        """A cell with a record that was read; the caller has another for it, or keeps this one."""
        with self._lock:
            if key in self._held:
                return cell
            if not self.free:
                leaving = min(self._held, key=self.asked.__getitem__, default=None)
                if leaving is None or self.asked[leaving] > self.asked[key]:
                    return cell
                self.free.append(self._held.pop(leaving))
            self._held[key] = cell
            return self.free.pop()

    @property
    def keys(self) -> list[Key]:
        """Of the records held, from the one longest not asked for."""
        with self._lock:
            return list(self._held)
