"""Maps experts to slots and evicts by a policy."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from speq.errors import Broken
from speq.scheduler.eviction import EvictionPolicy
from speq.scheduler.expert_key import ExpertKey


class ExpertCache:
    """One arena of slots, divided among layers by the policy. It moves no bytes.

    A slot is free, being filled (claimed, not yet published) or holds an expert. Pinned experts
    are not evicted.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        table: NDArray[np.int64] | None = None,
        in_table: Callable[[int, int], bool] = lambda layer, expert: True,
    ) -> None:
        """table     [layers, experts] to keep the slot of each expert in, -1 for none
        in_table  tells whether a (layer, expert) that has a slot is to be found there
        """
        if num_slots < 1:
            raise Broken("an expert cache needs at least one slot")
        self.num_slots = num_slots
        self.policy = policy
        # Slots whose memory is there, the first ones. Experts go where others were before they wait
        # for more.
        self.present = num_slots
        self._table = np.zeros((0, 0), np.int64) if table is None else table
        self._in_table = in_table
        self._spare = 0
        self._free: list[int] = []
        # By layer: prefetched experts that were used, and that were evicted unused.
        self.used: Counter[int] = Counter()
        self.wasted: Counter[int] = Counter()
        self.clear()

    def reserve(self, spare: int) -> None:
        """Keep `spare` slots out of the layers' shares, for experts that pass through."""
        self._spare = spare
        self.policy.divide(self.num_slots - spare)
        for layer in list(self._filled):
            self.trim(layer)

    def limit(self, num_slots: int, policy: EvictionPolicy | None = None) -> None:
        """Use the first `num_slots` slots of the arena from now on; none may be being filled.
        Experts in the others are evicted.

        policy  a new one, which takes the place of the present one; None: it stays
        """
        if policy is not None:
            self.policy = policy
            for key in self._slots:
                policy.touch(key)
        for key in [key for key, slot in self._slots.items() if slot >= num_slots]:
            self._evict(key)
        kept = [slot for slot in self._free if slot < num_slots]
        self._free = [*reversed(range(self.num_slots, num_slots)), *kept]
        self.num_slots = num_slots
        self.reserve(self._spare)

    def clear(self) -> None:
        """Empty every slot, also those being filled."""
        self.policy.clear()
        self._slots: dict[ExpertKey, int] = {}
        self._table.fill(-1)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._filled: Counter[int] = Counter()
        self._pins: Counter[ExpertKey] = Counter()
        self._unused: set[ExpertKey] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ExpertKey) -> bool:
        """Tell whether a slot holds `key`, without counting a use."""
        return key in self._slots

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def residents(self) -> list[ExpertKey]:
        """List the experts in slots, in no order, without counting a use."""
        return list(self._slots)

    def slot_of(self, key: ExpertKey) -> int:
        """Return the slot of a resident expert, without counting a use."""
        return self._slots[key]

    def lookup(self, key: ExpertKey) -> int | None:
        """Return the slot that holds `key`, or None, and count a use."""
        slot = self._slots.get(key)
        if slot is not None:
            self.policy.touch(key)
            if key in self._unused:
                self._unused.remove(key)
                self.used[key.layer] += 1
        return slot

    def count_used(self, layer: int, experts: Iterable[int]) -> None:
        """Count a use of resident experts."""
        if self._unused or not self.policy.keeps_all:
            for expert in experts:
                self.lookup(ExpertKey(layer, expert))

    def claim(self, layer: int, ahead: bool = False) -> int | None:
        """Claim a slot for an expert of `layer`, evicting if necessary; None if nothing can go.

        The caller publishes or releases it. A layer below its quota takes another layer's slot if
        none is free.

        ahead  True for a prefetch, which evicts no expert that is needed sooner
        """
        full = self._filled[layer] >= self.policy.quota(layer)
        there = self._free and (self._free[-1] < self.present or self.policy.keeps_all)
        if there and (self._spare or not full):
            self._filled[layer] += 1
            return self._free.pop()
        residents = self.policy.candidates(layer if full else None, ahead)
        victim = next((key for key in residents if key not in self._pins), None)
        if victim is None:
            return None
        self._filled[layer] += 1
        return self._evict(victim)

    def _evict(self, key: ExpertKey) -> int:
        self.policy.forget(key)
        self._filled[key.layer] -= 1
        if key in self._unused:
            self._unused.remove(key)
            self.wasted[key.layer] += 1
        self._enter(key, -1)
        return self._slots.pop(key)

    def _enter(self, key: ExpertKey, slot: int) -> None:
        if self._table.size:
            self._table[key.layer, key.expert] = slot

    def trim(self, layer: int) -> None:
        """Evict unpinned experts that a layer has beyond its share."""
        over = self._filled[layer] - self.policy.quota(layer)
        if over > 0:
            unpinned = [key for key in self.policy.candidates(layer) if key not in self._pins]
            self._free += [self._evict(key) for key in unpinned[:over]]

    def publish(self, key: ExpertKey, slot: int, ahead: bool = False) -> None:
        """Enter that `slot`, claimed before, holds `key`; ahead: it was prefetched."""
        if key in self._slots:
            raise Broken(f"{key} is in slot {self._slots[key]} and was published in slot {slot}")
        self._slots[key] = slot
        self._enter(key, slot if self._in_table(*key) else -1)
        self.policy.touch(key)
        if ahead:
            self._unused.add(key)

    def release(self, layer: int, slot: int) -> None:
        """Free a slot claimed for `layer` that was not filled."""
        self._filled[layer] -= 1
        self._free.append(slot)

    def pin(self, keys: Iterable[ExpertKey]) -> None:
        """Keep `keys` from eviction, once for each call, resident or not."""
        for key in keys:  # Counter.update takes several times as long for so few
            self._pins[key] += 1

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Undo one `pin`."""
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:  # or the cache was cleared meanwhile
                self._pins.pop(key, None)
