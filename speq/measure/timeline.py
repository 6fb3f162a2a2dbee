"""A run as a timeline, in the Chrome trace format that Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speq.files.atomic_file import write_whole
from speq.stats import Event, RunStats, StepStats

# Rows of the picture; readers follow.
STEPS, LAYERS, STALLS, READERS = range(1, 5)
ROW_OF = {"draft": STEPS, "verify": STEPS, "prefill": STEPS, "layer": LAYERS, "stall": STALLS}
PID = 1


def trace_events(run: RunStats) -> Iterator[dict[str, Any]]:
    """The events of a run, in the order of steps; times are microseconds since it was asked for."""
    names = {STEPS: "steps", LAYERS: "layers", STALLS: "waiting for experts"}
    readers = {event.reader for step in run.steps for event in step.events}
    names |= {READERS + reader: f"reader {reader}" for reader in readers if reader is not None}
    for row, name in sorted(names.items()):
        thread = {"ph": "M", "pid": PID, "tid": row}
        yield thread | {"name": "thread_name", "args": {"name": name}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": row}}
    for number, step in enumerate(run.steps):
        yield from _step(number, step, run.start_s)


def _step(number: int, step: StepStats, start_s: float) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "X",
        "pid": PID,
        "tid": STEPS,
        "name": f"{step.phase} {number}",
        **_span(step.start_s, step.end_s, start_s),
        "args": {
            "draft_length": step.draft_length,
            "accepted": step.accepted,
            "emitted": step.emitted,
            "reason": step.reason,
            "moved_bytes": step.moved_bytes,
            "hits": step.hits,
            "requests": step.requests,
        },
    }
    # What encloses others comes first where two begin together.
    for event in sorted(step.events, key=lambda event: (event.start_s, -event.end_s)):
        yield {
            "ph": "X",
            "pid": PID,
            "tid": _row(event),
            "name": _name(event),
            **_span(event.start_s, event.end_s, start_s),
            "cat": event.kind,
            "args": _arguments(event),
        }
    yield {
        "ph": "C",
        "pid": PID,
        "name": "bytes of the step",
        "ts": (step.end_s - start_s) * 1e6,
        "args": {"ahead": step.ahead_bytes, "on demand": step.moved_bytes - step.ahead_bytes},
    }


def _span(begin_s: float, end_s: float, start_s: float) -> dict[str, float]:
    return {"ts": (begin_s - start_s) * 1e6, "dur": (end_s - begin_s) * 1e6}


def _row(event: Event) -> int:
    return READERS + (event.reader or 0) if event.kind == "transfer" else ROW_OF[event.kind]


def _name(event: Event) -> str:
    if event.layer is None:
        return event.kind
    if event.expert is None:
        return f"{event.kind} {event.layer}"
    return f"{event.layer}.{event.expert}"


def _arguments(event: Event) -> dict[str, Any]:
    if event.kind not in ("transfer", "stall"):
        return {}
    cause = "ahead" if event.ahead else "on demand"
    found: dict[str, Any] = {"layer": event.layer, "expert": event.expert, "asked for": cause}
    return found | ({"moved_bytes": event.moved_bytes} if event.moved_bytes else {})


def write_trace(run: RunStats, path: Path) -> None:
    """Write a run's timeline, whole or not at all. Raises SpeqError where that cannot be done."""
    content = json.dumps({"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"})
    write_whole(path, content.encode())
