"""Divides a layer's missing experts between copying them to a device and computing on the host.

The host holds the records that copies are made from, so it can run an expert where it lies. Both go
on at once, and a layer is done when the slower one is. Rates are measured as the run goes.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from speq.scheduler.expert_key import ExpertKey

# Weight of a new measurement in the moving averages.
WEIGHT = 0.2
# Of a layer's uses, so much is the last visit's.
RECENCY = 0.03
# After so many layers without experts on the host one is computed there, to know its rate.
RETRY = 512


@dataclass(frozen=True, slots=True)
class ShareRates:
    """Seconds of an expert over the link, of one on the host while experts are copied and while
    none are, and of the rows' way to the host and back, once a layer.
    """

    copy_s: float
    beside_s: float
    alone_s: float
    round_trip_s: float

    def layer_s(self, copied: int, computed: int) -> float:
        """Seconds until so many experts are copied and so many computed."""
        copies_s = copied * self.copy_s
        if not computed:
            return copies_s
        # What is left when the last copy is done takes the rate without copies.
        shared = min(max(copies_s - self.round_trip_s, 0.0) / self.beside_s, computed)
        host_s = shared * self.beside_s + (computed - shared) * self.alone_s
        return max(copies_s, self.round_trip_s + host_s)

    def computed(self, missing: int) -> int:
        """The number of missing experts to compute on the host, so that the layer is done first;
        the least of several.
        """
        return min(
            range(missing + 1), key=lambda count: (self.layer_s(missing - count, count), count)
        )


def nothing() -> None:
    """Begin nothing."""


class HostShare:
    """Chooses the experts that the host computes, and measures what that takes.

    open   whether the layer that is served may have such experts
    begin  called where it has, before the device waits for copies
    holds  tells whether host memory has an expert's record
    expert_s  of an expert on the host, measured before; 0: not known
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        holds: Callable[[ExpertKey], bool],
        expert_s: float = 0.0,
    ) -> None:
        self.open = False
        self.begin: Callable[[], None] = nothing
        self._holds = holds
        self._uses = np.zeros((num_layers, num_experts))
        self._copy_s = self._round_trip_s = 0.0
        self._beside_s = self._alone_s = expert_s
        self._copied = 0  # of the last layer
        self._without = 0  # layers since one had experts on the host

    def copied(self, transfer_s: float) -> None:
        """Take the time that an expert takes over the link; 0 if it is not known."""
        self._copy_s = transfer_s

    def computed(self, experts: int, compute_s: float, round_trip_s: float) -> None:
        """Measure the layer just chosen for, of which the host has computed so many experts."""
        copies_s, expert_s = self._copied * self._copy_s, compute_s / experts
        if not self._alone_s:
            self._beside_s, self._alone_s, self._round_trip_s = expert_s, expert_s, round_trip_s
        self._round_trip_s += WEIGHT * (round_trip_s - self._round_trip_s)
        # A layer whose copies ended in between tells neither rate.
        if copies_s >= compute_s:
            self._beside_s += WEIGHT * (expert_s - self._beside_s)
            self._alone_s = min(self._alone_s, self._beside_s)
        elif not self._copied:
            self._alone_s += WEIGHT * (expert_s - self._alone_s)

    def visit(self, layer: int, keys: Collection[ExpertKey]) -> None:
        """Note that a layer uses these experts."""
        self._uses[layer] *= 1 - RECENCY
        self._uses[layer, [key.expert for key in keys]] += RECENCY

    def by_use(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Sort experts, those that were used least first."""
        return sorted(keys, key=lambda key: (self._uses[key], key))

    def choose(self, missing: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Choose those of a layer's missing experts that the host computes: the least used, since
        the others are worth a slot.
        """
        if not self.open or not self._copy_s:
            return []
        there = [key for key in missing if self._holds(key)]
        count = self._number(len(there))
        self._copied = len(there) - count
        self._without = 0 if count else self._without + 1
        return self.by_use(there)[:count]

    def _number(self, missing: int) -> int:
        if not self._alone_s or self._without >= RETRY:
            return min(missing // 2, 1)
        rates = ShareRates(self._copy_s, self._beside_s, self._alone_s, self._round_trip_s)
        return rates.computed(missing)
