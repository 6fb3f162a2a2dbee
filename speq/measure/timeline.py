"""Writes a run as a timeline in the trace event format of Perfetto and chrome://tracing.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from speq.files.atomic_file import write_whole
from speq.stats import RunStats, StepStats, TimeSpan

# The link that loads experts.
Link = Literal["disk", "PCIe"]
Row = dict[str, Any]

PID = 1
# Lanes of every timeline; lanes of transfers follow.
STEPS, DRAFT, VERIFY, LAYERS, STALLS, GOVERNOR, TRANSFERS = range(1, 8)
LANES = {
    STEPS: "steps",
    DRAFT: "draft",
    VERIFY: "verify",
    LAYERS: "verify by layer",
    STALLS: "stalls",
    GOVERNOR: "governor",
}
# Behind all others, where the host computes experts for a GPU.
HOST = 1000
# Prefill runs on the exact model, as verification does.
LANE_OF = {
    **{"draft": DRAFT, "verify": VERIFY, "prefill": VERIFY, "audit": VERIFY},
    **{"layer": LAYERS, "select": LAYERS, "stall": STALLS, "host": HOST},
}


@dataclass(frozen=True, slots=True)
class Zero:
    """Start of a timeline, in seconds of the recorder's clock.

    Times are whole nanoseconds, so that spans nest in the file as they do in the run.
    """

    at_s: float

    def nanoseconds(self, at_s: float) -> int:
        return round((at_s - self.at_s) * 1e9)

    def point(self, at_s: float) -> dict[str, float]:
        return {"ts": self.nanoseconds(at_s) / 1e3}

    def span(self, start_s: float, end_s: float) -> dict[str, float]:
        start, end = self.nanoseconds(start_s), self.nanoseconds(end_s)
        return {"ts": start / 1e3, "dur": (end - start) / 1e3}


# Name of a reader or copy stream, and a number among its lanes. Spans of a lane may not cross, so
# transfers that overlap others of their reader have further lanes.
Lane = tuple[str, int]


def transfer_lanes(run: RunStats, link: Link) -> dict[int, Lane]:
    """Assign a lane to each transfer, by the event's id."""
    transfers = [event for step in run.steps for event in step.events if event.kind == "transfer"]
    placed: dict[int, Lane] = {}
    until_s: dict[str, list[float]] = {}  # of each lane of a reader
    for event in sorted(transfers, key=lambda event: event.start_s):
        carrier = _carrier(event, link)
        ends = until_s.setdefault(carrier, [])
        free = (at for at, end_s in enumerate(ends) if end_s <= event.start_s)
        at = next(free, len(ends))
        ends[at : at + 1] = [event.end_s]
        placed[id(event)] = carrier, at
    return placed


def _carrier(event: TimeSpan, link: Link) -> str:
    reader = event.reader or 0
    if link == "disk":
        return f"reader {reader}"
    # An expert that a reader brought to host memory first has one span for both.
    return f"disk reader {reader} and copy" if event.read_bytes else f"copy stream {reader}"


def trace_events(run: RunStats, link: Link = "disk") -> Iterator[Row]:
    """Yield the events of a run: names of lanes first, then step by step.

    Times are microseconds since the run was requested, or since an earlier transfer began that
    ended within the run.
    """
    begun = [event.start_s for step in run.steps for event in step.events]
    zero = Zero(min([run.start_s, *begun]))
    placed = transfer_lanes(run, link)
    lanes = sorted(set(placed.values()), key=lambda lane: (len(lane[0]), lane))
    rows = {lane: TRANSFERS + at for at, lane in enumerate(lanes)}
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "speq"}}
    carriers = {
        row: f"{carrier}, beside ({at})" if at else carrier for (carrier, at), row in rows.items()
    }
    on_host = any(event.kind == "host" for step in run.steps for event in step.events)
    host = {HOST: "experts on the host"} if on_host else {}
    for row, name in (LANES | carriers | host).items():
        thread = {"ph": "M", "pid": PID, "tid": row}
        yield thread | {"name": "thread_name", "args": {"name": name}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": row}}
    for number, step in enumerate(run.steps):
        yield _step(number, step, zero)
        if step.phase == "decode":
            yield _decision(number, step, zero)
        # If two events begin together, the enclosing one comes first.
        for event in sorted(step.events, key=lambda event: (event.start_s, -event.end_s)):
            yield {
                "ph": "X",
                "pid": PID,
                "tid": rows[placed[id(event)]] if id(event) in placed else LANE_OF[event.kind],
                "name": _name(event),
                "cat": event.kind,
                **zero.span(event.start_s, event.end_s),
                "args": {"step": number} | _arguments(event),
            }
        yield from _counters(step, step.start_s, zero)
    if run.steps:  # a counter keeps its value up to the next one
        yield from _counters(StepStats("end"), run.steps[-1].end_s, zero)


def _step(number: int, step: StepStats, zero: Zero) -> Row:
    return {
        "ph": "X",
        "pid": PID,
        "tid": STEPS,
        "name": f"{step.phase} {number}",
        "cat": "step",
        **zero.span(step.start_s, step.end_s),
        "args": {
            "step": number,
            "draft_length": step.draft_length,
            "accepted": step.accepted,
            "emitted": step.emitted,
            "moved_bytes": step.moved_bytes,
            "requests": step.requests,
            "hits": step.hits,
        },
    }


def _decision(number: int, step: StepStats, zero: Zero) -> Row:
    return {
        "ph": "i",
        "s": "t",
        "pid": PID,
        "tid": GOVERNOR,
        "name": f"k={step.deepest}",
        "cat": "decision",
        **zero.point(step.start_s),
        "args": {
            "step": number,
            "draft_length": step.draft_length,
            "drafter": step.drafter,
            "ground": step.ground,
            "reason": step.reason,
            "forecast": step.forecast and asdict(step.forecast),
        },
    }


def _counters(step: StepStats, at_s: float, zero: Zero) -> Iterator[Row]:
    """Yield the counters of a step. Series of one counter are stacked, so they add up."""
    missed = step.requests - step.hits - step.late
    counters: dict[str, dict[str, int]] = {
        "bytes moved": {
            "ahead": step.ahead_bytes,
            "on demand": step.moved_bytes - step.ahead_bytes,
        },
        "bytes of rejected tokens": {"rejected": step.rejected_bytes},
        "experts asked for": {"hits": step.hits, "late": step.late, "missed": missed},
    }
    for name, values in counters.items():
        yield {"ph": "C", "pid": PID, "name": name, **zero.point(at_s), "args": values}


def _name(event: TimeSpan) -> str:
    if event.layer is None:
        return event.kind
    if event.expert is None:
        return f"{event.kind} {event.layer}"
    return f"{event.layer}.{event.expert}"


def _arguments(event: TimeSpan) -> dict[str, Any]:
    if event.kind not in ("transfer", "stall"):
        return {}
    cause = "ahead" if event.ahead else "on demand"
    found: dict[str, Any] = {"layer": event.layer, "expert": event.expert, "asked for": cause}
    if event.kind == "stall":
        return found
    return found | {"moved_bytes": event.moved_bytes, "read_bytes": event.read_bytes}


def write_trace(run: RunStats, path: Path, link: Link = "disk") -> None:
    """Write a run's timeline, whole or not at all. Raises SpeqError if that fails.

    link  tells whether readers or copy streams carried the experts
    """
    content = json.dumps({"traceEvents": list(trace_events(run, link)), "displayTimeUnit": "ms"})
    write_whole(path, content.encode())
