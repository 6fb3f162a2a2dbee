"""Statistics of a run: one StepStats for each step, with its timestamped events.

The governor, the command line and the benchmarks read these records and nothing else.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A timed event: `draft`, `verify`, `layer`, `transfer`, `stall` or `prefill`."""

    kind: str
    start_s: float
    end_s: float
    layer: int | None = None
    expert: int | None = None
    moved_bytes: int = 0
    read_bytes: int = 0
    ahead: bool = False
    reader: int | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def interval(self) -> "Interval":
        return self.start_s, self.end_s


@dataclass(slots=True)
class LayerStats:
    """Statistics of one MoE layer in a step, or in a run.

    passes          times it was served; covered: the sum over them of hits / requests
    requests, hits, late, used, wasted, late_s, stall_s, rejected_bytes  as in StepStats
    demand_bytes, ahead_bytes  moved on demand, and prefetched
    """

    passes: int = 0
    covered: float = 0.0
    requests: int = 0
    hits: int = 0
    late: int = 0
    used: int = 0
    wasted: int = 0
    demand_bytes: int = 0
    ahead_bytes: int = 0
    rejected_bytes: int = 0
    stall_s: float = 0.0
    late_s: float = 0.0

    def add(self, other: "LayerStats") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The governor's forecast of a step, in seconds, to compare with the time it took.

    draft_length            chosen length; the draft may be stopped before it
    serial_s, overlapped_s  by Eq. 3 of MoE-SpeQ, and with transfers hidden behind computation
    step_s                  basis of the decision: the model, corrected by measurements
    tokens                  1 + k_accept
    """

    draft_length: int
    serial_s: float
    overlapped_s: float
    step_s: float
    tokens: float


@dataclass(frozen=True, slots=True)
class DraftStats:
    """One request's draft in a batched step: tokens on its longest path, and accepted ones.

    stopped  True if it ended before the chosen length because another token was not worth it
    """

    draft_length: int
    accepted: int
    stopped: bool = False


@dataclass(slots=True)
class ApproximationStats:
    """Differences that an expert budget makes to the exact model, in one verification or several.

    verifications    within the budget
    natural, served  distinct (layer, expert) pairs that rows chose, and those that they were given
    wanted, kept     routing weight of the experts that accepted rows chose, and of the served ones
                     of them
    audited          tokens of verifications that also ran exactly; differing: those that would
                     have been others within the budget
    nats             sum of the exact model's log-probability of these tokens minus that within the
                     budget; nats_squared: sum of its squares
    """

    verifications: int = 0
    natural: int = 0
    served: int = 0
    wanted: float = 0.0
    kept: float = 0.0
    audited: int = 0
    differing: int = 0
    nats: float = 0.0
    nats_squared: float = 0.0

    def add(self, other: "ApproximationStats") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self) -> dict[str, Any]:
        """Return BUDGET_FIGURES by name; None for figures of audits if there was none."""
        audited, differing = self.audited, self.differing
        return {
            "verifications": self.verifications,
            "natural": self.natural,
            "served": self.served,
            "dropped_share": ratio(self.wanted - self.kept, self.wanted),
            "audited": audited,
            "differing": differing,
            "differing_share": ratio(differing, audited),
            "differing_interval": list(wilson(differing, audited)) if audited else None,
            "nats": ratio(self.nats, audited),
            "nats_interval": list(mean_interval(self.nats, self.nats_squared, audited))
            if audited > 1
            else None,
        }


# Standard errors to either side of a figure that make a 95 % interval.
Z = 1.96


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share `hits` / `trials`; trials: at least 1."""
    share, z2 = hits / trials, Z * Z
    middle = share + z2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(middle - half, 0.0) / scale, min((middle + half) / scale, 1.0)


def mean_interval(total: float, squares: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a mean, from the sum and sum of squares of 2 or more values."""
    mean = total / count
    variance = max(squares - total * mean, 0.0) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return mean - half, mean + half


@dataclass(slots=True)
class StepStats:
    """One step: a prefill, or a draft with its verification and acceptance.

    sequences      requests of its batch; figures are sums over them
    drafts         one for each of these, if there are several
    draft_length   tokens on the draft's longest path; branches: its other tokens
    passes         of the drafter; requests that draft in one pass share it
    given_up       tokens of the draft that were pruned in its verification
    cached_tokens  tokens of a prompt whose KV was cached, so that they were not run
    requests       distinct (layer, expert) pairs that the exact model requested
    hits           requests found in a slot
    late           requests found under way
    host_experts   requests that the host computed; host_s: time for that
    peer_experts   requests that further devices computed, hits among them
    used           prefetched experts that were then requested
    wasted         prefetched experts that were evicted unused
    layers         MoE layers passed; covered: the sum over them of hits / requests
    moved          experts loaded into slots; moved_bytes: their bytes
    ahead_bytes    bytes of prefetched experts among them
    rejected_bytes bytes of experts among them that only rejected tokens of the draft used
    read_bytes     bytes read from disk for them: whole blocks
    transfer_s     time of transfers, summed; link_s: time with any transfer; exposed_s: the part
                   of link_s in which the computation waited
    stall_s        time that the computation waited for experts; late_s: for prefetched ones
    by_layer       the same by layer
    named, choices expert choices of the exact model that the draft's recorded route had named, and
                   all choices of tokens with a recorded route
    drafter        that drafted instead of the run's own; None: none did
    ground, reason, forecast  of the decision for this draft length, if there was one
    select_s       time to choose experts within a budget; audit_s: time of its audits
    approximation  effect of the budget; None: the verification was exact
    """

    phase: str
    sequences: int = 1
    drafts: list[DraftStats] = field(default_factory=list)
    draft_length: int = 0
    branches: int = 0
    passes: int = 0
    given_up: int = 0
    accepted: int = 0
    emitted: int = 0
    cached_tokens: int = 0
    requests: int = 0
    hits: int = 0
    late: int = 0
    host_experts: int = 0
    peer_experts: int = 0
    used: int = 0
    wasted: int = 0
    layers: int = 0
    covered: float = 0.0
    moved: int = 0
    moved_bytes: int = 0
    ahead_bytes: int = 0
    rejected_bytes: int = 0
    read_bytes: int = 0
    named: int = 0
    choices: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    transfer_s: float = 0.0
    link_s: float = 0.0
    exposed_s: float = 0.0
    stall_s: float = 0.0
    late_s: float = 0.0
    select_s: float = 0.0
    audit_s: float = 0.0
    host_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    drafter: str | None = None
    ground: str = ""
    reason: str = ""
    forecast: Forecast | None = None
    approximation: ApproximationStats | None = None
    events: list[TimeSpan] = field(default_factory=list)
    by_layer: dict[int, LayerStats] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def rows(self) -> int:
        """Number of scored tokens: the pending ones and the drafted ones."""
        return self.sequences + self.draft_length + self.branches

    @property
    def each_draft(self) -> list[DraftStats]:
        """One DraftStats for each request, also if there is only one."""
        return self.drafts or [DraftStats(self.draft_length, self.accepted)]

    @property
    def deepest(self) -> int:
        """Number of tokens on the longest path of any draft."""
        return max((each.draft_length for each in self.drafts), default=self.draft_length)

    def layer(self, layer: int) -> LayerStats:
        """Return the statistics of one layer, to add to."""
        return self.by_layer.setdefault(layer, LayerStats())


# Start and end on one clock, in any unit.
Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap, into separate ones in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Intersect two lists of separate intervals in order."""
    found, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        start = max(one[left][0], other[right][0])
        end = min(one[left][1], other[right][1])
        if start < end:
            found.append((start, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


# Times the work of a block, of a kind and of a layer.
Timed = Callable[[str, int], AbstractContextManager[None]]
# Source of a token. accepted: drafted, and accepted by the exact model. exact: the exact model's
# own. prompt: its first one, which follows the prompt.
Origin = Literal["accepted", "exact", "prompt"]
# Newest events that are kept: at about 160 bytes each they stay a small part of a process.
MAX_EVENTS = 50_000
# Kinds of events whose durations are summed in a field of the step.
TIMED = {
    **{"draft": "draft_s", "verify": "verify_s", "transfer": "transfer_s", "stall": "stall_s"},
    **{"select": "select_s", "audit": "audit_s", "host": "host_s"},
}


class Recorder:
    """Collects the events of the current step, and the steps of the run. `clock` gives seconds.

    step       the current step, or the last one
    run        records every finished step; None: nothing does
    listeners  called with a finished step while it has all its events
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step = StepStats("idle")
        self.run: RunStats | None = None
        self.listeners: list[Callable[[StepStats], None]] = []

    def begin_run(self, run: "RunStats") -> "RunStats":
        """Record steps in `run` from now on."""
        self.run = run
        return run

    def begin(self, phase: str) -> StepStats:
        self.step = StepStats(phase, start_s=self.clock())
        return self.step

    def finish(self) -> StepStats:
        step = self.step
        step.end_s = self.clock()
        transfers = merge(event.interval for event in step.events if event.kind == "transfer")
        stalls = merge(event.interval for event in step.events if event.kind == "stall")
        step.link_s = length(transfers)
        step.exposed_s = length(overlap(transfers, stalls))
        # Before the run, which may drop the events.
        for listener in self.listeners:
            listener(step)
        if self.run is not None:
            self.run.record(step)
        return step

    @contextmanager
    def timed(
        self, kind: str, layer: int | None = None, expert: int | None = None, moved_bytes: int = 0
    ) -> Iterator[None]:
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(TimeSpan(kind, start_s, self.clock(), layer, expert, moved_bytes))

    def add(self, event: TimeSpan) -> None:
        step = self.step
        step.events.append(event)
        step.moved_bytes += event.moved_bytes
        step.read_bytes += event.read_bytes
        step.ahead_bytes += event.moved_bytes * event.ahead
        if event.kind in TIMED:
            name = TIMED[event.kind]
            setattr(step, name, getattr(step, name) + event.duration_s)
        if event.layer is None:
            return
        if event.kind == "transfer":
            step.moved += 1
            layer = step.layer(event.layer)
            layer.ahead_bytes += event.moved_bytes * event.ahead
            layer.demand_bytes += event.moved_bytes * (not event.ahead)
        elif event.kind == "stall":
            layer = step.layer(event.layer)
            layer.stall_s += event.duration_s
            layer.late_s += event.duration_s * event.ahead
            step.late_s += event.duration_s * event.ahead

    def used(self, layer: int, experts: int = 1) -> None:
        """Count prefetched experts that were used."""
        self.step.used += experts
        self.step.layer(layer).used += experts

    def wasted(self, layer: int, experts: int = 1) -> None:
        """Count prefetched experts that were evicted unused."""
        self.step.wasted += experts
        self.step.layer(layer).wasted += experts

    def served(self, layer: int, requests: int, hits: int, late: int = 0) -> None:
        """Count one layer's requests for experts."""
        covered = hits / requests
        step, of_layer = self.step, self.step.layer(layer)
        step.layers += 1
        of_layer.passes += 1
        for figures in (step, of_layer):
            figures.requests += requests
            figures.hits += hits
            figures.late += late
            figures.covered += covered

    def rejected(self, keys: Set[tuple[int, int]]) -> None:
        """Count the bytes moved for these (layer, expert) pairs as rejected."""
        for event in self.step.events:
            layer, expert = event.layer, event.expert
            if event.kind == "transfer" and layer is not None and (layer, expert) in keys:
                self.step.rejected_bytes += event.moved_bytes
                self.step.layer(layer).rejected_bytes += event.moved_bytes


# The figures of a run, in the order in which docs/statistics.md explains them.
FIGURES = {
    "new_tokens": "generated tokens, the first one included",
    "ttft_ms": "time from the call to the first token",
    "tpot_ms": "time per output token after the first: time in decode steps over the tokens that "
    "they emitted; a step counts once for each request of its batch",
    "steps": "steps of draft and verification",
    "side_steps": "steps whose draft came from prompt lookup (`ngram`) instead of the run's own "
    "drafter, or for lack of one",
    "batch_mean": "mean number of requests in a step",
    "draft_length_mean": "drafted tokens per step and request; of a tree, on its longest path",
    "branches_mean": "drafted tokens outside the longest path, per step and request",
    "given_up_mean": "drafted tokens pruned in their verification, per step and request: their "
    "experts would have cost more than they were worth",
    "accept_length_mean": "tokens per step and request (acceptance length, tau): the accepted ones "
    "and one of the exact model's own (the bonus token)",
    "acceptance_rate": "accepted tokens over drafted ones, without those outside the longest path",
    "route_recall": "share of the exact model's expert choices that the draft's routes had named "
    "(accepted tokens only)",
    "hit_rate": "share of requested experts found in a slot; a layer requests each distinct expert "
    "of a pass once",
    "coverage": "mean of this share over the layers of all steps",
    "moved_bytes": "bytes of experts loaded in decode; all 16 bits count if experts are encoded as "
    "they are read, and of an expert larger than its slot whenever it is computed",
    "moved_bytes_per_token": "the same per emitted token",
    "ahead_bytes": "part of `moved_bytes` that was prefetched",
    "rejected_bytes": "part of `moved_bytes` for experts that only rejected tokens of a draft used",
    "read_bytes": "bytes read from disk for `moved_bytes`, in whole blocks",
    "late_rate": "share of requested experts that were still being loaded",
    "used": "prefetched experts that were then used",
    "wasted": "prefetched experts that were evicted unused",
    "stall_s": "time that the computation waited for experts in decode",
    "late_s": "part of `stall_s` spent on prefetched experts",
    "draft_s": "time in drafting",
    "verify_s": "time in verification, with stalls and the choice of tokens",
    "transfer_s": "time to load experts in decode, summed over reader threads",
    "link_s": "time in which at least one expert was being loaded",
    "hidden_share": "share of `link_s` in which the computation did not wait",
    "verified_bytes": "bytes of experts that were compared with their checksums, in prefill too: "
    "each record of a pack or a packed copy when it is first read in a process, and with "
    "`verify_reads`, or of a copy that the run still writes, at every read",
    "verified_s": "time to compare them, summed over reader threads",
    "prefill_s": "time of prefill",
    "prefill_moved_bytes": "`moved_bytes` of prefill",
    "prefill_read_bytes": "`read_bytes` of prefill",
    "prefill_stall_s": "`stall_s` of prefill",
    "prefill_hit_rate": "`hit_rate` of prefill; experts prefetched in time count as hits",
    "cached_tokens": "tokens of the prompt whose KV was cached by an earlier request; they were "
    "not run",
    "select_s": "time to choose experts within an expert budget",
    "audit_s": "time of its audits, part of `verify_s`",
    "host_experts": "requested experts that the host computed for a GPU in decode",
    "host_s": "time for that, part of `verify_s`",
    "peer_experts": "requested experts that further GPUs computed in decode; they count as hits",
    "budget": "effect of an expert budget, see below; null if the run was exact",
    "layers": "figures of each MoE layer in decode, see below",
    "memory": "the budget item by item, in bytes: `budget`, `non_expert_weights`, `draft`, "
    "`kv_cache`, `read_buffers`, `graphs` (if passes are recorded), `workspace`, `slots`, "
    "`unused`; on a GPU also `device_overhead` (memory of libraries and torch's allocator), "
    "`host_records` (host memory for experts, in addition to the budget), `host_pinned` "
    "(the part of it that the system locked) and `peer_slots` (further GPUs', likewise)",
    "card": "figures of the GPU from its driver during the run (NVML), if it gave any: bytes "
    "received over PCIe per second (mean and maximum), clocks, and memory in use",
    "codec": "codec of the experts in slots",
    "dense": "form of the weights outside the experts: raw, lossless or residual",
    "sums": "order in which exact products are added up: canonical or fast",
    "planned": "the planner's reason for codec and draft, if it had a choice",
    "reader_threads": "threads that read experts from disk, as given or as a survey chose",
}
BUDGET_FIGURES = {
    "verifications": "verifications within the budget",
    "natural": "distinct (layer, expert) pairs that their rows chose",
    "served": "distinct pairs that they were given",
    "dropped_share": "routing weight of accepted tokens' own experts that were not served, over "
    "the weight of all of them",
    "audited": "tokens of verifications that also ran exactly",
    "differing": "audited tokens that would have been others within the budget",
    "differing_share": "`differing` over `audited`",
    "differing_interval": "its 95 % interval (Wilson), from and to",
    "nats": "mean over audited tokens: the exact model's log-probability of its token minus that "
    "within the budget. Both use the same KV of earlier tokens, budgeted ones included",
    "nats_interval": "its 95 % interval, from and to",
}
LAYER_FIGURES = {
    "layer": "the layer's number among the MoE layers, from 0",
    "passes": "times the layer was served",
    "covered": "sum over passes of hits over requests",
    "requests": "distinct experts requested, summed over passes",
    "hits": "requested experts found in a slot",
    "late": "requested experts that were still being loaded",
    "used": "prefetched experts that were then used",
    "wasted": "prefetched experts that were evicted unused",
    "demand_bytes": "bytes moved on demand",
    "ahead_bytes": "bytes moved by prefetches",
    "rejected_bytes": "bytes moved for experts that only rejected tokens used",
    "stall_s": "time that the computation waited for this layer's experts",
    "late_s": "part of `stall_s` spent on prefetched experts",
}


# Those that are sums over the steps of decode: counts, and times.
SUMMED = (
    *("moved_bytes", "ahead_bytes", "read_bytes", "rejected_bytes", "used", "wasted"),
    *("host_experts", "peer_experts"),
)
SUMMED_S = (*TIMED.values(), "late_s", "link_s")


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if whole is 0."""
    return part / whole if whole else None


@dataclass(slots=True)
class RunStats:
    """The steps of one generation, and their sums: FIGURES defines each figure.

    codec    of the experts in slots
    dense    form of the weights outside the experts
    sums     order in which exact products are added up
    planned  the planner's reason for these and the draft, if it had a choice
    readers  threads that read experts from disk
    card     figures of the GPU during the run, if its driver gave any
    readings of the driver during the run: `speq.devices.card.CardReading`
    verified_bytes  of records compared with their checksums; verified_s: time for that
    """

    start_s: float
    memory: dict[str, int]
    codec: str = "raw"
    dense: str = "raw"
    sums: str = "fast"
    planned: str | None = None
    readers: int = 0
    card: dict[str, Any] | None = None
    readings: list[Any] = field(default_factory=list)
    verified_bytes: int = 0
    verified_s: float = 0.0
    steps: list[StepStats] = field(default_factory=list)
    layers: dict[int, LayerStats] = field(default_factory=dict)
    _details: int = 0
    _trimmed: int = 0

    def record(self, step: StepStats) -> None:
        """Add a step. With too many events, the oldest steps keep only their sums."""
        self.steps.append(step)
        if step.phase == "decode":
            for layer, figures in step.by_layer.items():
                self.layers.setdefault(layer, LayerStats()).add(figures)
        self._details += len(step.events) + len(step.by_layer)
        while self._details > MAX_EVENTS and self._trimmed < len(self.steps):
            oldest = self.steps[self._trimmed]
            self._details -= len(oldest.events) + len(oldest.by_layer)
            oldest.events.clear()
            oldest.by_layer.clear()
            self._trimmed += 1

    @property
    def trimmed(self) -> int:
        """Number of first steps whose events and layers are no longer kept."""
        return self._trimmed

    @property
    def decode(self) -> list[StepStats]:
        """The steps after prefill."""
        return [step for step in self.steps if step.phase == "decode"]

    def total(self, name: str, phase: str = "decode") -> Any:
        """The sum of a figure of `StepStats` over the steps of a phase."""
        return sum(getattr(step, name) for step in self.steps if step.phase == phase)

    def budget(self) -> dict[str, Any] | None:
        """Return BUDGET_FIGURES by name; None for an exact run."""
        whole = ApproximationStats()
        for step in self.steps:
            if step.approximation is not None:
                whole.add(step.approximation)
        return whole.summary() if whole.verifications else None

    def summary(self) -> dict[str, Any]:
        """Return FIGURES by name; None for a figure that this run does not have."""
        decode, total = self.decode, self.total
        prefill = [step for step in self.steps if step.phase == "prefill"]
        return {
            "new_tokens": sum(step.emitted for step in self.steps),
            "ttft_ms": (prefill[-1].end_s - self.start_s) * 1e3 if prefill else None,
            "tpot_ms": ratio(
                sum(step.duration_s * step.sequences for step in decode) * 1e3, total("emitted")
            ),
            "steps": len(decode),
            "side_steps": sum(step.drafter is not None for step in decode),
            "batch_mean": ratio(total("sequences"), len(decode)),
            "draft_length_mean": ratio(total("draft_length"), total("sequences")),
            "branches_mean": ratio(total("branches"), total("sequences")),
            "given_up_mean": ratio(total("given_up"), total("sequences")),
            "accept_length_mean": ratio(total("emitted"), total("sequences")),
            "acceptance_rate": ratio(total("accepted"), total("draft_length")),
            "route_recall": ratio(total("named"), total("choices")),
            "hit_rate": ratio(total("hits"), total("requests")),
            "coverage": ratio(total("covered"), total("layers")),
            **{name: total(name) for name in SUMMED},
            **{name: float(total(name)) for name in SUMMED_S},
            "late_rate": ratio(total("late"), total("requests")),
            "moved_bytes_per_token": ratio(total("moved_bytes"), total("emitted")),
            "hidden_share": ratio(total("link_s") - total("exposed_s"), total("link_s")),
            "verified_bytes": self.verified_bytes,
            "verified_s": self.verified_s,
            "prefill_s": float(total("duration_s", "prefill")),
            "prefill_moved_bytes": total("moved_bytes", "prefill"),
            "prefill_read_bytes": total("read_bytes", "prefill"),
            "prefill_stall_s": float(total("stall_s", "prefill")),
            "prefill_hit_rate": ratio(total("hits", "prefill"), total("requests", "prefill")),
            "cached_tokens": total("cached_tokens", "prefill"),
            "budget": self.budget(),
            "layers": [
                {"layer": layer} | asdict(figures) for layer, figures in sorted(self.layers.items())
            ],
            "memory": dict(self.memory),
            "card": self.card,
            "codec": self.codec,
            "dense": self.dense,
            "sums": self.sums,
            "planned": self.planned,
            "reader_threads": self.readers,
        }
