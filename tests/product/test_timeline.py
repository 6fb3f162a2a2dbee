"""Timelines of runs: valid trace events, each where it belongs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speq import Generator, SpeqError
from speq.measure.timeline import trace_events, write_trace
from speq.stats import Event, RunStats, StepStats

Row = dict[str, Any]


def run_by_hand() -> RunStats:
    prefill = StepStats("prefill", emitted=1, start_s=10.0, end_s=11.0)
    prefill.events.append(Event("prefill", 10.0, 11.0))
    decode = StepStats(
        "decode",
        draft_length=2,
        accepted=1,
        emitted=2,
        reason="as asked for",
        moved_bytes=300,
        ahead_bytes=100,
        hits=3,
        requests=5,
        start_s=12.0,
        end_s=14.5,
    )
    decode.events += [
        Event("transfer", 12.25, 13.0, 1, 7, moved_bytes=100, ahead=True, reader=1),
        Event("draft", 12.0, 12.5),
        Event("stall", 12.75, 13.0, 1, 7, ahead=True),
        Event("layer", 12.5, 13.5, 1),
        Event("verify", 12.5, 14.5),
        Event("transfer", 13.0, 13.5, 0, 2, moved_bytes=200, reader=0),
    ]
    run = RunStats(9.5, {})
    run.record(prefill)
    run.record(decode)
    return run


def rows_by_name(events: list[Row]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_a_timeline_by_hand() -> None:
    events = list(trace_events(run_by_hand()))
    names = {1: "steps", 2: "layers", 3: "waiting for experts", 4: "reader 0", 5: "reader 1"}
    assert rows_by_name(events) == names
    order = [e for e in events if e["name"] == "thread_sort_index"]
    assert [(e["tid"], e["args"]["sort_index"]) for e in order] == [(tid, tid) for tid in names]

    spans = [e for e in events if e["ph"] == "X"]
    placed = [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in spans]
    # Microseconds since the run was asked for, what encloses others first.
    assert placed == [
        ("prefill 0", "steps", 0.5e6, 1e6),
        ("prefill", "steps", 0.5e6, 1e6),
        ("decode 1", "steps", 2.5e6, 2.5e6),
        ("draft", "steps", 2.5e6, 0.5e6),
        ("1.7", "reader 1", 2.75e6, 0.75e6),
        ("verify", "steps", 3e6, 2e6),
        ("layer 1", "layers", 3e6, 1e6),
        ("1.7", "waiting for experts", 3.25e6, 0.25e6),
        ("0.2", "reader 0", 3.5e6, 0.5e6),
    ]
    by_place = {(e["name"], names[e["tid"]]): e for e in spans}
    assert by_place["decode 1", "steps"]["args"] == {
        "draft_length": 2,
        "accepted": 1,
        "emitted": 2,
        "reason": "as asked for",
        "moved_bytes": 300,
        "hits": 3,
        "requests": 5,
    }
    assert by_place["1.7", "reader 1"]["args"] == {
        "layer": 1,
        "expert": 7,
        "asked for": "ahead",
        "moved_bytes": 100,
    }
    assert by_place["0.2", "reader 0"]["args"]["asked for"] == "on demand"
    late = by_place["1.7", "waiting for experts"]
    assert (late["cat"], late["args"]) == (
        "stall",
        {"layer": 1, "expert": 7, "asked for": "ahead"},
    )
    counters = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [
        (1.5e6, {"ahead": 0, "on demand": 0}),
        (5e6, {"ahead": 100, "on demand": 200}),
    ]
    assert len(events) == 2 * len(names) + len(spans) + len(counters)


def test_an_empty_run_has_rows_only() -> None:
    events = list(trace_events(RunStats(0.0, {})))
    assert {e["ph"] for e in events} == {"M"}
    assert list(rows_by_name(events).values()) == ["steps", "layers", "waiting for experts"]


def nested(spans: list[Row]) -> bool:
    """Whether any two of a row lie apart or one within the other, as the format wants."""
    slack = 1e-3  # of a microsecond: rounding
    open_until: list[float] = []
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        end = span["ts"] + span["dur"]
        while open_until and open_until[-1] <= span["ts"] + slack:
            open_until.pop()
        if open_until and end > open_until[-1] + slack:
            return False
        open_until.append(end)
    return True


def test_a_real_run(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    generator = Generator.from_pretrained(
        tiny("qwen3_moe"),
        "900KiB",
        draft_length=3,
        cache_policy="lookahead",
        prefetch="three-phase",
        reader_threads=3,
        context_length=64,
    )
    try:
        assert generator.last_run is None
        result = generator.generate("hello there", max_new_tokens=16, ignore_eos=True)
        run = generator.last_run
    finally:
        generator.close()
    assert run is not None
    assert run.summary() == result.stats
    target = tmp_path / "trace.json"
    write_trace(run, target)
    content = json.loads(target.read_text())
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    events = content["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    for event in events:
        assert event["pid"] == 1
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["tid"] in rows_by_name(events)
    names = rows_by_name(events)
    of_row = {
        name: [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        for tid, name in names.items()
    }
    steps = [e for e in of_row["steps"] if "cat" not in e]
    parts = [e for e in of_row["steps"] if "cat" in e]
    assert [e["name"].split()[0] for e in steps] == ["prefill"] + ["decode"] * (len(steps) - 1)
    assert len(steps) == len(run.steps) > 3
    for row in ("steps", "layers", *(name for name in names.values() if "reader" in name)):
        assert of_row[row], row
        assert nested(of_row[row]), row
    # Every draft and verification lies in its step, every layer in a part of one.
    for within, around in ((parts, steps), (of_row["layers"], parts)):
        for event in within:
            assert any(
                outer["ts"] <= event["ts"] + 1e-3
                and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-3
                for outer in around
            ), event
    moved = [e for name, row in of_row.items() if "reader" in name for e in row]
    assert {name for name in names.values() if "reader" in name} <= {
        "reader 0",
        "reader 1",
        "reader 2",
    }
    assert sum(e["args"]["moved_bytes"] for e in moved) == (
        result.stats["moved_bytes"] + result.stats["prefill_moved_bytes"]
    )
    last = max(e["ts"] + e["dur"] for e in steps)
    assert last == pytest.approx((run.steps[-1].end_s - run.start_s) * 1e6)


def test_a_trace_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeqError, match=r"trace\.json cannot be written: File exists"):
        write_trace(run_by_hand(), tmp_path / "file" / "trace.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpeqError, match="folder cannot be written: Is a directory"):
        write_trace(run_by_hand(), tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    target = tmp_path / "new" / "trace.json"
    write_trace(run_by_hand(), target)
    assert [path.name for path in target.parent.iterdir()] == ["trace.json"]
    assert len(json.loads(target.read_text())["traceEvents"]) == 21
