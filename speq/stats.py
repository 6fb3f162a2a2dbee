"""What a run measured: one StepStats a step, with timestamped events behind it.

The governor, the command line and the benchmarks read these records and nothing else.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time: `draft`, `verify`, `layer`, `transfer`, `stall` or `prefill`."""

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
    def span(self) -> "TimeSpan":
        return self.start_s, self.end_s


@dataclass(slots=True)
class LayerStats:
    """One MoE layer's part in a step, or in a run.

    passes          times it was served; covered: the sum over them of hits / requests
    requests, hits, late, used, wasted, late_s, stall_s, rejected_bytes  as in StepStats
    demand_bytes, ahead_bytes  moved when asked for, and ahead of that
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
    """What the governor expected of a cycle, in seconds, to compare with what it took.

    draft_length            decided on: a draft may be stopped before
    serial_s, overlapped_s  by Eq. 3 of MoE-SpeQ, and with transfers hidden behind computation
    cycle_s                 what the decision was based on: the model corrected by measurements
    tokens                  1 + k_accept
    """

    draft_length: int
    serial_s: float
    overlapped_s: float
    cycle_s: float
    tokens: float


@dataclass(frozen=True, slots=True)
class DraftStats:
    """One text's draft in a step of several: tokens on its longest path, and those accepted.

    stopped  whether it ended before the length decided on, as one token more was not worth it
    """

    draft_length: int
    accepted: int
    stopped: bool = False


@dataclass(slots=True)
class ApproximationStats:
    """What an expert budget kept of the exact model, in one verification or in several.

    verifications    within the budget
    natural, served  distinct (layer, expert) pairs that rows wanted, and those that they were given
    wanted, kept     routing weight of the experts that accepted rows wanted, and of those of them
                     that were served
    audited          tokens of verifications that ran exactly as well; differing: those that would
                     have been others within the budget
    nats             the exact model's log-probability of these tokens less that within the budget,
                     summed; nats_squared: of its squares
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
        """BUDGET_FIGURES by name; None where nothing was audited."""
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


# Standard errors to either side of a figure, within which it lies 95 times of 100.
Z = 1.96


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was `hits` of `trials`, at least one."""
    share, z2 = hits / trials, Z * Z
    middle = share + z2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(middle - half, 0.0) / scale, min((middle + half) / scale, 1.0)


def mean_interval(total: float, squares: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a mean, by a sum and the sum of squares of `count` values, 2 or more."""
    mean = total / count
    variance = max(squares - total * mean, 0.0) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return mean - half, mean + half


@dataclass(slots=True)
class StepStats:
    """One step: a prefill, or one round of draft, verification and acceptance.

    sequences      texts of its batch; figures are sums over them
    drafts         of each of these, where they are several
    draft_length   tokens of the draft, on its longest path; branches: those beside that path
    passes         of what drafted; texts that draft in one pass share it
    given_up       tokens of the draft that were given up in its verification
    cached_tokens  of a prompt: those that had entries, and were not run
    requests       distinct (layer, expert) pairs the exact model asked for
    hits           those that lay in a slot when asked for
    late           those that were under way when asked for
    used           experts brought ahead of their need that were then asked for
    wasted         experts brought ahead of their need and evicted before it came
    layers         MoE layers passed; covered: the sum over them of hits / requests
    moved          experts brought into slots; moved_bytes: their bytes
    ahead_bytes    of them, those asked for ahead of their need
    rejected_bytes of them, those of experts that none but rejected tokens of the draft wanted
    read_bytes     bytes read from the disk for them: whole blocks
    transfer_s     summed over transfers; link_s: while there was any; exposed_s: while, besides,
                   the computation waited
    stall_s        the computation waited for experts; late_s: of that, for those asked for ahead
    by_layer       the same, layer by layer
    named, choices expert choices of the exact model that the draft's recorded route had named, of
                   those for which it had recorded a route (token by token)
    drafter        that drafted in place of the run's own; None: none did
    ground, reason, forecast  of the decision for this draft length, as far as there was one
    select_s       in the choice of experts within a budget; audit_s: in audits of it
    approximation  what the budget kept; None: the verification was exact
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
    start_s: float = 0.0
    end_s: float = 0.0
    drafter: str | None = None
    ground: str = ""
    reason: str = ""
    forecast: Forecast | None = None
    approximation: ApproximationStats | None = None
    events: list[Event] = field(default_factory=list)
    by_layer: dict[int, LayerStats] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def rows(self) -> int:
        """Tokens that were scored: the pending ones and the drafts'."""
        return self.sequences + self.draft_length + self.branches

    @property
    def each_draft(self) -> list[DraftStats]:
        """Of each text, also where it is one."""
        return self.drafts or [DraftStats(self.draft_length, self.accepted)]

    @property
    def deepest(self) -> int:
        """Tokens on the longest path of any draft."""
        return max((each.draft_length for each in self.drafts), default=self.draft_length)

    def layer(self, layer: int) -> LayerStats:
        """The figures of one layer, to add to."""
        return self.by_layer.setdefault(layer, LayerStats())


# From when to when, on one clock, in any unit.
TimeSpan = tuple[float, float]


def merged(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The times at which any of the spans was under way, as separate intervals in order."""
    found: list[TimeSpan] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[TimeSpan], other: Sequence[TimeSpan]) -> list[TimeSpan]:
    """When both were under way, each a list of separate intervals in order."""
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


def length(spans: Iterable[TimeSpan]) -> float:
    return sum(end - start for start, end in spans)


# Times the work of a block, of a kind and of a layer.
Timed = Callable[[str, int], AbstractContextManager[None]]
# Where a token is from. accepted: drafted, and kept by the exact model. exact: the exact model's
# own. prompt: its first one, which follows the prompt.
Origin = Literal["accepted", "exact", "prompt"]
# Events kept, the last ones: about 160 bytes each, so that they stay a small part of a process.
MAX_EVENTS = 50_000
# Kinds of events whose durations add up in a field of the step's record.
TIMED = {
    **{"draft": "draft_s", "verify": "verify_s", "transfer": "transfer_s", "stall": "stall_s"},
    **{"select": "select_s", "audit": "audit_s"},
}


class Recorder:
    """Collects the events of the step under way, and the steps of the run. `clock` gives seconds.

    step       the one under way, or the last one
    run        is told of every step that is finished, where there is one
    listeners  hear of a finished step while all its events are there
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
        transfers = merged(event.span for event in step.events if event.kind == "transfer")
        stalls = merged(event.span for event in step.events if event.kind == "stall")
        step.link_s = length(transfers)
        step.exposed_s = length(overlap(transfers, stalls))
        # Before the run, which may let go of the events.
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
            self.add(Event(kind, start_s, self.clock(), layer, expert, moved_bytes))

    def add(self, event: Event) -> None:
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
        """Count experts that were brought ahead of their need, which has come."""
        self.step.used += experts
        self.step.layer(layer).used += experts

    def wasted(self, layer: int, experts: int = 1) -> None:
        """Count experts that were brought ahead of their need and evicted before it came."""
        self.step.wasted += experts
        self.step.layer(layer).wasted += experts

    def served(self, layer: int, requests: int, hits: int, late: int = 0) -> None:
        """Count one layer's requests to the slots."""
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
        """Tell apart what the step moved for these (layer, expert), which proved not wanted."""
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
    "they emitted; a step counts for each text of its batch",
    "steps": "rounds of drafting and verifying",
    "side_steps": "of them, those whose draft came from prompt lookup (`ngram`) in place of the "
    "run's own drafter, or where there is none",
    "batch_mean": "texts of a step, which share its passes",
    "draft_length_mean": "drafted tokens per step and text; of a tree those on its longest path",
    "branches_mean": "drafted tokens beside the longest path, per step and text",
    "given_up_mean": "drafted tokens given up in their verification, per step and text: their "
    "experts would have cost more than they were worth",
    "accept_length_mean": "tokens that a step yields of each text: the accepted ones and one of "
    "the exact model's own (the bonus token)",
    "acceptance_rate": "accepted tokens over drafted ones, those beside the longest path left out",
    "route_recall": "share of the exact model's expert choices that the draft's routes had named "
    "(accepted tokens only)",
    "hit_rate": "share of requested experts that lay in a slot when their layer asked; a layer "
    "requests each distinct expert of a pass once",
    "coverage": "the same share for each layer of each step, averaged",
    "moved_bytes": "bytes of experts brought into slots while decoding; all 16 bits count if "
    "experts are encoded as they are read",
    "moved_bytes_per_token": "the same per emitted token",
    "ahead_bytes": "part of `moved_bytes` that was asked for before it was needed",
    "rejected_bytes": "part of `moved_bytes` for experts that only rejected tokens of a draft "
    "wanted",
    "read_bytes": "bytes read from the disk for `moved_bytes`, in whole blocks",
    "late_rate": "share of requested experts that were still on their way",
    "used": "experts asked for ahead of their need that were then needed",
    "wasted": "experts asked for ahead of their need that were evicted before it came",
    "stall_s": "time in which the computation waited for experts, while decoding",
    "late_s": "part of `stall_s` spent on experts that were asked for ahead",
    "draft_s": "time in drafting",
    "verify_s": "time in verifying, stalls and the choice of tokens included",
    "transfer_s": "time in moving experts while decoding, summed over reader threads",
    "link_s": "time in which at least one expert was being moved",
    "hidden_share": "share of `link_s` in which the computation did not wait",
    "verified_bytes": "bytes of experts that were compared with their checksums, the prompt's "
    "included: each record of a pack or a packed copy when it is first read in a process, and with "
    "`verify_reads` at every read",
    "verified_s": "time in that, summed over reader threads, which others read meanwhile",
    "prefill_s": "time in the prompt",
    "prefill_moved_bytes": "`moved_bytes` of the prompt",
    "prefill_read_bytes": "`read_bytes` of the prompt",
    "prefill_stall_s": "`stall_s` of the prompt",
    "prefill_hit_rate": "`hit_rate` of the prompt; experts read ahead in time count as hits",
    "cached_tokens": "tokens of the prompt whose KV entries an earlier text had made; they were "
    "not run",
    "select_s": "time in the choice of experts within an expert budget",
    "audit_s": "time in audits of it, part of `verify_s`",
    "budget": "what an expert budget cost, see below; null where the run was exact",
    "layers": "figures of each MoE layer while decoding, see below",
    "memory": "the budget item by item, in bytes: `budget`, `non_expert_weights`, `draft`, "
    "`kv_cache`, `read_buffers`, `graphs` (where passes are recorded), `workspace`, `slots`, "
    "`unused`; on a GPU also `device_overhead` (what libraries and torch's allocator take of it), "
    "`host_records` (memory of the host that experts take, beside the budget) and `host_pinned` "
    "(what of it the system locked)",
    "card": "what the driver of a GPU said of it during the run (NVML), where it said anything: "
    "bytes received over PCIe per second, on average and at most, clocks, and memory in use",
    "codec": "how experts lay in slots: the name of the codec",
    "dense": "how weights outside the experts were held: raw, lossless or residual",
    "planned": "the planner's reason for codec and draft, if there was something to weigh",
}
BUDGET_FIGURES = {
    "verifications": "verifications within the budget",
    "natural": "distinct (layer, expert) pairs that their rows wanted",
    "served": "distinct pairs that they were given",
    "dropped_share": "routing weight of accepted tokens' own experts that were not served, over "
    "all of theirs",
    "audited": "tokens of verifications that ran exactly as well",
    "differing": "of these, tokens that would have been others within the budget",
    "differing_share": "`differing` over `audited`",
    "differing_interval": "its 95 % interval (Wilson), from and to",
    "nats": "mean over audited tokens: the exact model's log-probability of its token less that "
    "within the budget. Both have the same entries of earlier tokens, budgeted ones included",
    "nats_interval": "its 95 % interval, from and to",
}
LAYER_FIGURES = {
    "layer": "the layer's number among the MoE layers, from 0",
    "passes": "times the layer was served",
    "covered": "sum over passes of hits over requests",
    "requests": "distinct experts requested, summed over passes",
    "hits": "requested experts that lay in a slot",
    "late": "requested experts that were on their way",
    "used": "experts asked for ahead of their need that were then needed",
    "wasted": "experts asked for ahead of their need that were evicted before it came",
    "demand_bytes": "bytes moved when the layer asked",
    "ahead_bytes": "bytes moved ahead of that",
    "rejected_bytes": "bytes moved for experts that only rejected tokens wanted",
    "stall_s": "time in which the computation waited for this layer's experts",
    "late_s": "part of `stall_s` spent on experts that were asked for ahead",
}


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there was nothing to divide by."""
    return part / whole if whole else None


@dataclass(slots=True)
class RunStats:
    """The steps of one generation, and what they add up to: FIGURES defines each figure.

    codec    of the experts in slots
    dense    form of the weights outside the experts
    planned  why, where the planner had that and the draft to weigh
    card     figures of the GPU during the run, where its driver gave any
    readings what the driver says while the run goes on: `speq.devices.card.CardReading`
    verified_bytes  of records that were compared with their checksums; verified_s: time in that
    """

    start_s: float
    memory: dict[str, int]
    codec: str = "raw"
    dense: str = "raw"
    planned: str | None = None
    card: dict[str, Any] | None = None
    readings: list[Any] = field(default_factory=list)
    verified_bytes: int = 0
    verified_s: float = 0.0
    steps: list[StepStats] = field(default_factory=list)
    layers: dict[int, LayerStats] = field(default_factory=dict)
    _details: int = 0
    _trimmed: int = 0

    def record(self, step: StepStats) -> None:
        """Add a step; of the oldest ones only the sums are kept, once there are many events."""
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
        """Steps, the first ones, whose events and layers are no longer kept."""
        return self._trimmed

    @property
    def decode(self) -> list[StepStats]:
        """The steps behind the prompt."""
        return [step for step in self.steps if step.phase == "decode"]

    def total(self, name: str, phase: str = "decode") -> Any:
        """The sum of a figure of `StepStats` over the steps of a phase."""
        return sum(getattr(step, name) for step in self.steps if step.phase == phase)

    def budget(self) -> dict[str, Any] | None:
        """BUDGET_FIGURES by name; None for an exact run."""
        whole = ApproximationStats()
        for step in self.steps:
            if step.approximation is not None:
                whole.add(step.approximation)
        return whole.summary() if whole.verifications else None

    def summary(self) -> dict[str, Any]:
        """FIGURES by name; None where a figure does not exist for this run."""
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
            "moved_bytes": total("moved_bytes"),
            "ahead_bytes": total("ahead_bytes"),
            "read_bytes": total("read_bytes"),
            "rejected_bytes": total("rejected_bytes"),
            "late_rate": ratio(total("late"), total("requests")),
            "used": total("used"),
            "wasted": total("wasted"),
            "moved_bytes_per_token": ratio(total("moved_bytes"), total("emitted")),
            "stall_s": float(total("stall_s")),
            "late_s": float(total("late_s")),
            "draft_s": float(total("draft_s")),
            "verify_s": float(total("verify_s")),
            "transfer_s": float(total("transfer_s")),
            "link_s": float(total("link_s")),
            "hidden_share": ratio(total("link_s") - total("exposed_s"), total("link_s")),
            "verified_bytes": self.verified_bytes,
            "verified_s": self.verified_s,
            "prefill_s": float(total("duration_s", "prefill")),
            "prefill_moved_bytes": total("moved_bytes", "prefill"),
            "prefill_read_bytes": total("read_bytes", "prefill"),
            "prefill_stall_s": float(total("stall_s", "prefill")),
            "prefill_hit_rate": ratio(total("hits", "prefill"), total("requests", "prefill")),
            "cached_tokens": total("cached_tokens", "prefill"),
            "select_s": float(total("select_s")),
            "audit_s": float(total("audit_s")),
            "budget": self.budget(),
            "layers": [
                {"layer": layer} | asdict(figures) for layer, figures in sorted(self.layers.items())
            ],
            "memory": dict(self.memory),
            "card": self.card,
            "codec": self.codec,
            "dense": self.dense,
            "planned": self.planned,
        }
