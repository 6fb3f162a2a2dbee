"""Which expert lies in which record of the host's memory, from where a device copies it.

Where all fit, they stay. Otherwise the records keep what is asked for most, and the rest passes
through them from the disk. What stays on the device is not asked for here, so a record of it is
among the first to be reused: the two tiers hold different experts.
"""

from collections import Counter
from typing import Protocol

import numpy as np
from torch import Tensor

from speq.scheduler.expert_key import ExpertKey

# A use counts so much more than the one before: a new text is not judged by an old one. A token
# makes some tens or hundreds of uses, so that some tens of tokens are remembered.
GROWTH = 1.0003
# Counts are brought down again where they would leave float64 behind.
LARGEST = 1e100


class Tier(Protocol):
    """Memory that a device copies records from, and the disk behind it.

    contents  (layer, expert) of the records that are filled at first, record 0 on
    """

    @property
    def resident(self) -> bool:
        """Whether all experts are held, so that the disk is never asked."""

    @property
    def num_records(self) -> int: ...

    @property
    def contents(self) -> list[tuple[int, int]]: ...

    def record(self, at: int) -> Tensor:
        """[slot_bytes] uint8: record number `at`."""

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        """Fill a record from the disk, in any thread; the bytes read."""

    def record_bytes(self, layer: int, expert: int) -> int:
        """Bytes of an expert's record: what a copy to the device moves."""


class HostRecords:
    """Finds experts among a tier's records, and makes room for others. It moves no bytes."""

    def __init__(self, tier: Tier) -> None:
        self._at: dict[ExpertKey, int] = {}
        self._keys: list[ExpertKey | None] = [None] * tier.num_records
        # Of late, by record: negative where it holds nothing.
        self._uses = np.full(tier.num_records, -1.0)
        self._use = 1.0
        self._pins: Counter[int] = Counter()
        for at, (layer, expert) in enumerate(tier.contents):
            self._keep(at, ExpertKey(layer, expert))

    def residents(self) -> list[ExpertKey]:
        """The experts that records hold, in no order; asking is no use of them."""
        return list(self._at)

    def take(self, key: ExpertKey) -> int | None:
        """The record that holds `key`, kept there until `give_back`; None where none does."""
        at = self._at.get(key)
        if at is not None:
            self._pins[at] += 1
            self._uses[at] += self._use
            self._grow()
        return at

    def claim(self) -> int | None:
        """A record to read an expert into, kept until `give_back`: an empty one, or else the one
        that was least used; None where all are in use.
        """
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
        """Record `at`, claimed before, holds `key` now."""
        self._keep(at, key)
        self._grow()

    def give_back(self, at: int) -> None:
        """Take one `take` or `claim` back."""
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
