"""What competes at equal device memory: how exact experts are held, and how far is drafted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from speq.bench.replay.replay import Times
from speq.planning.memory import MIN_SLOTS
from speq.stats import RunStats, ratio

# Eviction and prefetching of the baseline, and of what follows the draft or the routers.
ON_DEMAND = ("lru", "none")
AHEAD = ("lookahead", "three-phase")


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What an exact expert takes with a codec.

    weights      of an expert
    slot_bytes   of a slot: the largest record, in whole blocks
    moved_bytes  of a record, in the mean
    compute      time of experts' arithmetic out of such slots, of that out of raw ones
    """

    codec: str
    weights: int
    slot_bytes: int
    moved_bytes: int
    compute: float = 1.0

    def times(self, raw: Times) -> Times:
        """What a machine takes with such experts, where it takes `raw` with plain words."""
        return replace(
            raw,
            expert_s=raw.expert_s * self.compute,
            transfer_s=raw.transfer_s * self.moved_bytes / raw.moved_bytes,
            moved_bytes=self.moved_bytes,
        )

    def row(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "bits_per_weight": 8 * self.moved_bytes / self.weights,
            "moved_bytes": self.moved_bytes,
            "slot_bytes": self.slot_bytes,
            "compute": self.compute,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to spend a share of memory. cache_policy, prefetch: as on the command line."""

    codec: str
    draft_length: int
    cache_policy: str
    prefetch: str

    @property
    def has_draft(self) -> bool:
        """Whether the INT4 copy is held: residual experts are decoded with it."""
        return self.draft_length > 0 or self.codec == "residual"

    def __str__(self) -> str:
        return f"{self.codec}, k = {self.draft_length}, {self.cache_policy}, {self.prefetch}"


def candidates_of(draft_lengths: list[int]) -> dict[str, list[Candidate]]:
    """The systems by name, and what each may be."""
    named = {
        "LRU raw": [Candidate("raw", 0, *ON_DEMAND)],
        "LRU lossless": [Candidate("lossless", 0, *ON_DEMAND)],
        "draft + raw": [Candidate("raw", length, *AHEAD) for length in draft_lengths],
        "draft + residual": [Candidate("residual", length, *AHEAD) for length in draft_lengths],
    }
    every = [candidate for candidates in named.values() for candidate in candidates]
    return named | {"auto": [*every, Candidate("lossless", 0, *AHEAD)]}


def choose(token_ms: Mapping[Candidate, float]) -> Candidate:
    """Of the least predicted time per token, the first named where several are equal.

    Predictions come from a short trial; a planner's would take their place here.
    """
    return min(token_ms, key=lambda candidate: token_ms[candidate])


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """num_experts: of all layers; expert_bytes: one's, in plain words; draft_bytes: of the INT4
    copy of all.
    """

    num_experts: int
    expert_bytes: int
    draft_bytes: int

    def slots(self, fraction: float, slot_bytes: int, has_draft: bool) -> int:
        """Slots in this fraction of the plain words' bytes, a draft's taken off: no more than there
        are experts, and 0 where that leaves fewer than any run needs.
        """
        room = int(fraction * self.num_experts * self.expert_bytes) - has_draft * self.draft_bytes
        slots = min(room // slot_bytes, self.num_experts)
        return slots if slots >= min(MIN_SLOTS, self.num_experts) else 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one candidate did, on average over the tokens it emitted.

    compute_ms  of tpot_ms, without waiting for experts; link_ms: while any was being moved
    """

    slots: int
    tpot_ms: float
    moved_bytes: float
    rejected_bytes: float
    compute_ms: float
    link_ms: float
    acceptance_rate: float | None

    @classmethod
    def of(cls, slots: int, runs: Sequence[RunStats]) -> "Outcome":
        """From runs that each decoded at least one step."""

        def total(name: str) -> float:
            return float(sum(run.total(name) for run in runs))

        tokens, decode_s = total("emitted"), total("duration_s")
        return cls(
            slots=slots,
            tpot_ms=decode_s / tokens * 1e3,
            moved_bytes=total("moved_bytes") / tokens,
            rejected_bytes=total("rejected_bytes") / tokens,
            compute_ms=(decode_s - total("stall_s")) / tokens * 1e3,
            link_ms=total("link_s") / tokens * 1e3,
            acceptance_rate=ratio(total("accepted"), total("draft_length")),
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What one system is and did: measured once, or in rounds. candidate None: none fits."""

    candidate: Candidate | None = None
    outcomes: Sequence[Outcome] = ()

    def median(self, name: str) -> float:
        """Of a figure of the outcomes, over rounds."""
        return float(median(getattr(outcome, name) for outcome in self.outcomes))

    @property
    def tpot_spread(self) -> float:
        """From the fastest to the slowest round, in parts of the median."""
        times = [outcome.tpot_ms for outcome in self.outcomes]
        return (max(times) - min(times)) / self.median("tpot_ms")
