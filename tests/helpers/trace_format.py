"""The trace event format, held strictly: what a file may contain, and which spans of a lane cross.

Google's "Trace Event Format" (Duca, Sinclair):
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
Of its phases those that are written here are known: complete events, instants, counters, metadata.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import isfinite
from typing import Any

Row = dict[str, Any]

# By phase: keys that an event has, and keys that it may have.
REQUIRED = {
    "X": {"ph", "name", "pid", "tid", "ts", "dur"},
    "i": {"ph", "name", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "M": {"ph", "name", "pid", "args"},
}
OPTIONAL = {
    "X": {"cat", "args", "tts", "tdur", "cname"},
    "i": {"cat", "args", "s", "cname"},
    "C": {"cat", "tid", "id", "cname"},
    "M": {"tid", "ts", "cat"},
}
# Arguments of metadata events, and whether they are of a thread.
METADATA: dict[str, tuple[str, type, bool]] = {
    "process_name": ("name", str, False),
    "process_labels": ("labels", str, False),
    "process_sort_index": ("sort_index", int, False),
    "thread_name": ("name", str, True),
    "thread_sort_index": ("sort_index", int, True),
}
SCOPES = {"g", "p", "t"}
OF_OBJECT = {"traceEvents", "displayTimeUnit", "otherData", "systemTraceEvents", "stackFrames"}


def faults(content: Any) -> list[str]:
    """What of a parsed file breaks the format, in sentences."""
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return ["the file is no object with a list of traceEvents"]
    found = [f"the object has {key!r}" for key in sorted(set(content) - OF_OBJECT)]
    if content.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit is {content['displayTimeUnit']!r}")
    for at, event in enumerate(content["traceEvents"]):
        found += [f"event {at}: {fault}" for fault in of_event(event)]
    if found:
        return found
    named = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["ph"] in ("X", "i")}
    return [f"the lane {lane} has no name" for lane in sorted(used - named)]


def of_event(event: Any) -> Iterator[str]:
    """What is wrong with one event."""
    if not isinstance(event, dict):
        yield "it is no object"
        return
    phase = event.get("ph")
    if phase not in REQUIRED:
        yield f"its phase is {phase!r}"
        return
    missing = REQUIRED[phase] - set(event)
    if missing:
        yield f"it lacks {sorted(missing)}"
        return
    for key in sorted(set(event) - REQUIRED[phase] - OPTIONAL[phase]):
        yield f"it has {key!r}, which phase {phase} has not"
    for key in ("name", "cat"):
        if key in event and (not isinstance(event[key], str) or not event[key]):
            yield f"{key} is {event[key]!r}"
    for key in ("pid", "tid"):
        if key in event and not whole(event[key]):
            yield f"{key} is {event[key]!r}"
    for key in ("ts", "dur", "tts", "tdur"):
        if key in event and not (number(event[key]) and event[key] >= 0):
            yield f"{key} is {event[key]!r}"
    if not isinstance(event.get("args", {}), dict):
        yield f"args is {event['args']!r}"
        return
    if phase == "i" and event.get("s", "t") not in SCOPES:
        yield f"its scope is {event['s']!r}"
    if phase == "C":
        yield from _of_counter(event["args"])
    if phase == "M":
        yield from _of_metadata(event)


def _of_counter(args: Row) -> Iterator[str]:
    if not args:
        yield "a counter has no series"
    for series, value in args.items():
        if not number(value):
            yield f"series {series!r} is {value!r}"


def _of_metadata(event: Row) -> Iterator[str]:
    if event["name"] not in METADATA:
        yield f"there is no metadata {event['name']!r}"
        return
    argument, kind, of_thread = METADATA[event["name"]]
    if set(event["args"]) != {argument}:
        yield f"{event['name']} has arguments {sorted(event['args'])}"
    elif type(event["args"][argument]) is not kind:
        yield f"{argument} is {event['args'][argument]!r}"
    if of_thread and "tid" not in event:
        yield f"{event['name']} is of no thread"


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def nanoseconds(microseconds: float) -> int:
    """Of a time in the file, which is in thousandths of a microsecond."""
    return round(microseconds * 1e3)


def crossing(events: list[Row]) -> list[tuple[Row, Row]]:
    """Complete events of a lane that overlap, neither within the other: a pair for each such event
    and the innermost one that was under way when it began.
    """
    lanes: dict[tuple[int, int], list[tuple[int, int, Row]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event["dur"])
            lanes[event["pid"], event["tid"]].append((start, end, event))
    found = []
    for spans in lanes.values():
        around: list[tuple[int, Row]] = []
        for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][0] <= start:
                around.pop()
            if around and end > around[-1][0]:
                found.append((around[-1][1], event))
            around.append((end, event))
    return found
