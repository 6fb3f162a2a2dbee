"""How fast threads read experts, alone and beside kernels that read memory on all cores."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import fmean, median, stdev

from torch import Tensor

from speq.experts.expert_store import ExpertStore
from speq.units import Clock

# Of experts from the disk, at most: bytes, and seconds of a thread.
TRIAL_BYTES, TRIAL_S = 64 << 20, 0.1
# Reads alone and beside kernels take turns so often.
TURNS = 3


def link_bytes_per_s(
    store: ExpertStore,
    slots: Sequence[Tensor],
    clock: Clock,
    nbytes: int = TRIAL_BYTES,
    first: int = 0,
    limit_s: float = TRIAL_S,
) -> float:
    """At which threads together read experts from the disk.

    slots   one for each thread
    nbytes  in all, at most; first: number of the first read, so that others are of other experts
    limit_s  until a thread begins no other read
    """
    readers, count = len(slots), store.num_layers * store.num_experts
    mean_bytes = max(store.moved_bytes(0, 0), 1)
    each = min(max(nbytes // mean_bytes // readers, 1), max(count // readers, 1))

    def read(reader: int) -> int:
        moved, begun_s = 0, clock()
        for turn in range(each):
            at = (first + reader * each + turn) * 7919 % count  # far apart, as misses are
            layer, expert = divmod(at, store.num_experts)
            store.read(layer, expert, slots[reader])
            moved += store.moved_bytes(layer, expert)
            if clock() - begun_s > limit_s:
                break
        return moved

    store.read(0, 0, slots[0])  # opens files
    with ThreadPoolExecutor(readers) as pool:
        start_s = clock()
        moved = sum(pool.map(read, range(readers)))
        return moved / max(clock() - start_s, 1e-9)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What the link gives alone, and what it and kernels take from each other.

    bytes_per_s  alone; spread: standard deviation of the logarithms of its samples
    link_slows, compute_slows  times as long as alone that each takes beside the other, at least 1
    """

    bytes_per_s: float
    spread: float
    link_slows: float
    compute_slows: float

    @classmethod
    def of(
        cls, link: Callable[[int], float], kernel: Callable[[], object], clock: Clock
    ) -> "LinkRates":
        """Take turns, so that a machine whose speed changes favours none.

        link    reads so long as a survey may, and says the rate; it is given the sample's number
        kernel  computes on all cores
        """

        def call_s(until: Callable[[], bool]) -> float:
            """Mean time of the kernel's calls."""
            begun_s, calls = clock(), 0
            while not calls or not until():
                kernel()
                calls += 1
            return max(clock() - begun_s, 1e-9) / calls

        def is_over(end_s: float) -> bool:
            return clock() >= end_s

        alone, beside, alone_s, beside_s = [], [], [], []
        with ThreadPoolExecutor(1) as pool:
            for turn in range(TURNS):
                begun_s = clock()
                alone.append(link(2 * turn))
                end_s = 2 * clock() - begun_s
                alone_s.append(call_s(partial(is_over, end_s)))
                reads = pool.submit(link, 2 * turn + 1)
                beside_s.append(call_s(reads.done))
                beside.append(reads.result())
        logs = [log(rate) for rate in alone]
        return cls(
            median(alone),
            stdev(logs),
            max(median(alone) / median(beside), 1.0),
            max(fmean(beside_s) / fmean(alone_s), 1.0),
        )
