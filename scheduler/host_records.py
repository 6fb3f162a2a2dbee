"""Maps experts to records in host memory, from which a device copies them.

If all experts fit, they stay. Otherwise the records keep the most requested experts, and the others
pass through from disk. Experts that stay on the device are not requested here, so their records are
reused first: the two tiers hold different experts.
"""

from collections import Counter
from typing import Protocol

import numpy as np
from torch import Tensor

from speq.scheduler.expert_key import ExpertKey

# Growth of a use's weight, so that a new sequence is not judged by an old one. A token makes tens
# or hundreds of uses, so about tens of tokens are remembered.
GROWTH = 1.0003
# Weights are rescaled above this, before they overflow float64.
LARGEST = 1e100


class Tier(Protocol):
    """Host memory that a device copies records from, and the disk behind it.

    contents  (layer, expert) of the records filled at first, from record 0 on
    """

    @property
    def resident(self) -> bool:
        """True if host memory holds all experts, so that the disk is never read."""

    @property
    def num_records(self) -> int: ...

    @property
    def contents(self) -> list[tuple[int, int]]: ...

    def record(self, at: int) -> Tensor:
        """Record number `at`, [slot_bytes] uint8."""

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        """Fill a record from disk, in any thread; return the bytes read."""

    def record_bytes(self, layer: int, expert: int) -> int:
        """Bytes that a copy of the expert to the device moves."""


class HostRecords:
    """Maps experts to a tier's records, and evicts. It moves no bytes."""

    def __init__(self, tier: Tier) -> None:
        self._at: dict[ExpertKey, int] = {}
        self._keys: list[ExpertKey | None] = [None] * tier.num_records
        # Decayed uses by record; negative for an empty one.
        self._uses = np.full(tier.num_records, -1.0)
        self._use = 1.0
        self._pins: Counter[int] = Counter()
        for at, (layer, expert) in enumerate(tier.contents):
            self._keep(at, ExpertKey(layer, expert))

    def residents(self) -> list[ExpertKey]:
        """List the experts that records hold, in no order, without counting a use."""
        return list(self._at)

    def holds(self, key: ExpertKey) -> bool:
        """Tell whether a record holds `key`, without counting a use."""
        return key in self._at

    def take(self, key: ExpertKey) -> int | None:
        """Pin and return the record that holds `key`, or None. `give_back` unpins it."""
        at = self._at.get(key)
        if at is not None:
            self._pins[at] += 1
            self._uses[at] += self._use
            self._grow()
        return at

    def claim(self) -> int | None:
        """Pin and return an empty or the least used record; None if all are pinned."""
        order = self._uses.copy()
        order[list(self._pins)] = np.inf
        at = int(order.argmin())
        if order[at] == np.inf:
            return None
        key = self._keys[at]
        if key is not None:
            self._keys[at] = None
            self._uses[at] = -1.0
            del self._at[key]
        self._pins[at] += 1
        return at

    def publish(self, at: int, key: ExpertKey) -> None:
        """Enter that record `at`, claimed before, holds `key`."""
        self._keep(at, key)
        self._grow()

    def give_back(self, at: int) -> None:
        """Undo one `take` or `claim`."""
        if self._pins[at] > 1:
            self._pins[at] -= 1
        else:
            del self._pins[at]

    def give_back_all(self) -> None:
        self._pins.clear()

    def _keep(self, at: int, key: ExpertKey) -> None:
        self._keys[at] = key
        self._at[key] = at
        self._uses[at] = self._use

    def _grow(self) -> None:
        self._use *= GROWTH
        if self._use > LARGEST:
            self._uses = np.where(self._uses < 0, -1.0, self._uses / self._use)
            self._use = 1.0
