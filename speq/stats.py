"""What a run measured: one StepStats a step, with timestamped events behind it.

The governor, the command line and the benchmarks read these records and nothing else.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


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

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class StepStats:
    """One step: a prefill, or one round of draft, verification and acceptance.

    requests       distinct (layer, expert) pairs the exact model asked for
    hits           those that lay in a slot when asked for
    late           those that were under way when asked for
    wasted         experts brought ahead of their need and evicted before it came
    layers         MoE layers passed; covered: the sum over them of hits / requests
    moved_bytes    bytes of experts brought into slots
    ahead_bytes    of them, those asked for ahead of their need
    read_bytes     bytes read from the disk for them: whole blocks
    named, choices expert choices of the exact model that the draft's recorded route had named, of
                   those for which it had recorded a route (token by token)
    """

    phase: str
    draft_length: int = 0
    accepted: int = 0
    emitted: int = 0
    requests: int = 0
    hits: int = 0
    late: int = 0
    wasted: int = 0
    layers: int = 0
    covered: float = 0.0
    moved_bytes: int = 0
    ahead_bytes: int = 0
    read_bytes: int = 0
    named: int = 0
    choices: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    transfer_s: float = 0.0
    stall_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    reason: str = ""
    events: list[Event] = field(default_factory=list)


# Events kept, the last ones: about 160 bytes each, so that they stay a small part of a process.
MAX_EVENTS = 50_000
# Kinds of events whose durations add up in a field of the step's record.
TIMED = {"draft": "draft_s", "verify": "verify_s", "transfer": "transfer_s", "stall": "stall_s"}


class Recorder:
    """Collects the events of the step under way. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step = StepStats("idle")

    def begin(self, phase: str) -> StepStats:
        self.step = StepStats(phase, start_s=self.clock())
        return self.step

    def finish(self) -> StepStats:
        self.step.end_s = self.clock()
        return self.step

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

    def wasted(self, experts: int) -> None:
        """Count experts evicted before their need came."""
        self.step.wasted += experts

    def served(self, requests: int, hits: int, late: int = 0) -> None:
        """Count one layer's requests to the slots."""
        self.step.requests += requests
        self.step.hits += hits
        self.step.late += late
        self.step.layers += 1
        self.step.covered += hits / requests


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there was nothing to divide by."""
    return part / whole if whole else None


@dataclass(slots=True)
class RunStats:
    """The steps of one generation, and what they add up to. README defines each figure."""

    start_s: float
    memory: dict[str, int]
    steps: list[StepStats] = field(default_factory=list)
    _events: int = 0
    _trimmed: int = 0

    def record(self, step: StepStats) -> None:
        self.steps.append(step)
        self._events += len(step.events)
        while self._events > MAX_EVENTS and self._trimmed < len(self.steps):
            oldest = self.steps[self._trimmed]
            self._events -= len(oldest.events)
            oldest.events.clear()
            self._trimmed += 1

    def summary(self) -> dict[str, Any]:
        """The figures of `--json`, by name; None where a figure does not exist for this run."""
        decode = [step for step in self.steps if step.phase == "decode"]
        prefill = [step for step in self.steps if step.phase == "prefill"]

        def total(name: str, steps: list[StepStats] = decode) -> Any:
            return sum(getattr(step, name) for step in steps)

        drafting = [step for step in decode if step.draft_length]
        decode_s = sum(step.end_s - step.start_s for step in decode)
        return {
            "new_tokens": total("emitted", self.steps),
            "ttft_ms": (prefill[-1].end_s - self.start_s) * 1e3 if prefill else None,
            "tpot_ms": ratio(decode_s * 1e3, total("emitted")),
            "steps": len(decode),
            "draft_length_mean": ratio(total("draft_length"), len(decode)),
            "accept_length_mean": ratio(total("emitted"), len(decode)),
            "acceptance_rate": ratio(total("accepted", drafting), total("draft_length", drafting)),
            "route_recall": ratio(total("named"), total("choices")),
            "hit_rate": ratio(total("hits"), total("requests")),
            "coverage": ratio(total("covered"), total("layers")),
            "moved_bytes": total("moved_bytes"),
            "ahead_bytes": total("ahead_bytes"),
            "read_bytes": total("read_bytes"),
            "late_rate": ratio(total("late"), total("requests")),
            "wasted": total("wasted"),
            "moved_bytes_per_token": ratio(total("moved_bytes"), total("emitted")),
            "stall_s": float(total("stall_s")),
            "draft_s": float(total("draft_s")),
            "verify_s": float(total("verify_s")),
            "transfer_s": float(total("transfer_s")),
            "prefill_s": float(sum(step.end_s - step.start_s for step in prefill)),
            "prefill_moved_bytes": total("moved_bytes", prefill),
            "prefill_read_bytes": total("read_bytes", prefill),
            "prefill_stall_s": float(total("stall_s", prefill)),
            "prefill_hit_rate": ratio(total("hits", prefill), total("requests", prefill)),
            "memory": dict(self.memory),
        }
