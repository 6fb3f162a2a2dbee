"""Timelines of runs: valid trace events, each where it belongs, which add up to the statistics."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import Generator, SpeqError
from speq.measure.timeline import Link, trace_events, write_trace
from speq.stats import Forecast, RunStats, StepStats, TimeSpan
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.tiny_models import write_model
from tests.helpers.trace_format import crossing, faults, nanoseconds

Row = dict[str, Any]

FORECAST = Forecast(draft_length=3, serial_s=2.0, overlapped_s=1.5, step_s=1.75, tokens=2.5)
PROMPT = [7, 3, 200, 41, 9]
ALWAYS = ["steps", "draft", "verify", "verify by layer", "stalls", "governor"]


def run_by_hand() -> RunStats:
    prefill = StepStats("prefill", emitted=1, start_s=10.0, end_s=11.0)
    prefill.events.append(TimeSpan("prefill", 10.0, 11.0))
    decode = StepStats(
        "decode",
        draft_length=2,
        accepted=1,
        emitted=2,
        ground="model",
        reason="as asked for",
        forecast=FORECAST,
        moved_bytes=300,
        ahead_bytes=100,
        rejected_bytes=50,
        hits=3,
        late=1,
        requests=6,
        start_s=12.0,
        end_s=14.5,
    )
    decode.events += [
        TimeSpan(
            "transfer", 12.25, 13.0, 1, 7, moved_bytes=100, read_bytes=128, ahead=True, reader=1
        ),
        TimeSpan("draft", 12.0, 12.5),
        TimeSpan("stall", 12.75, 13.0, 1, 7, ahead=True),
        TimeSpan("layer", 12.5, 13.5, 1),
        TimeSpan("verify", 12.5, 14.5),
        TimeSpan("transfer", 13.0, 13.5, 0, 2, moved_bytes=200, reader=0),
    ]
    run = RunStats(9.5, {})
    run.record(prefill)
    run.record(decode)
    return run


def rows_by_name(events: list[Row]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def written(run: RunStats, path: Path, link: Link = "disk") -> list[Row]:
    """The events of a file, which keeps to the format."""
    write_trace(run, path, link)
    content = json.loads(path.read_text())
    assert faults(content) == []
    events: list[Row] = content["traceEvents"]
    assert crossing(events) == []
    return events


def test_a_timeline_by_hand(tmp_path: Path) -> None:
    events = written(run_by_hand(), tmp_path / "trace.json")
    names = rows_by_name(events)
    assert names == dict(enumerate([*ALWAYS, "reader 0", "reader 1"], start=1))
    order = [e for e in events if e["name"] == "thread_sort_index"]
    assert [(e["tid"], e["args"]["sort_index"]) for e in order] == [(tid, tid) for tid in names]

    spans = [e for e in events if e["ph"] == "X"]
    placed = [(e["name"], names[e["tid"]], e["cat"], e["ts"], e["dur"]) for e in spans]
    # Microseconds since the run was asked for, what encloses others first.
    assert placed == [
        ("prefill 0", "steps", "step", 0.5e6, 1e6),
        ("prefill", "verify", "prefill", 0.5e6, 1e6),
        ("decode 1", "steps", "step", 2.5e6, 2.5e6),
        ("draft", "draft", "draft", 2.5e6, 0.5e6),
        ("1.7", "reader 1", "transfer", 2.75e6, 0.75e6),
        ("verify", "verify", "verify", 3e6, 2e6),
        ("layer 1", "verify by layer", "layer", 3e6, 1e6),
        ("1.7", "stalls", "stall", 3.25e6, 0.25e6),
        ("0.2", "reader 0", "transfer", 3.5e6, 0.5e6),
    ]
    by_place = {(e["name"], names[e["tid"]]): e["args"] for e in spans}
    assert by_place["decode 1", "steps"] == {
        "step": 1,
        "draft_length": 2,
        "accepted": 1,
        "emitted": 2,
        "moved_bytes": 300,
        "requests": 6,
        "hits": 3,
    }
    late = {"step": 1, "layer": 1, "expert": 7, "asked for": "ahead"}
    assert by_place["1.7", "stalls"] == late
    assert by_place["1.7", "reader 1"] == late | {"moved_bytes": 100, "read_bytes": 128}
    assert by_place["0.2", "reader 0"]["asked for"] == "on demand"
    (decision,) = [e for e in events if e["ph"] == "i"]
    assert (decision["name"], decision["ts"], names[decision["tid"]]) == ("k=2", 2.5e6, "governor")
    assert decision["args"] == {
        "step": 1,
        "draft_length": 2,
        "drafter": None,
        "ground": "model",
        "reason": "as asked for",
        "forecast": {
            "draft_length": 3,
            "serial_s": 2.0,
            "overlapped_s": 1.5,
            "step_s": 1.75,
            "tokens": 2.5,
        },
    }
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    moved, rejected, experts = "bytes moved", "bytes of rejected tokens", "experts asked for"
    none = [{"ahead": 0, "on demand": 0}, {"rejected": 0}, {"hits": 0, "late": 0, "missed": 0}]
    # From the beginning of a step on, and nothing from the end of the last one.
    assert counters == [
        (moved, 0.5e6, none[0]),
        (rejected, 0.5e6, none[1]),
        (experts, 0.5e6, none[2]),
        (moved, 2.5e6, {"ahead": 100, "on demand": 200}),
        (rejected, 2.5e6, {"rejected": 50}),
        (experts, 2.5e6, {"hits": 3, "late": 1, "missed": 2}),
        (moved, 5e6, none[0]),
        (rejected, 5e6, none[1]),
        (experts, 5e6, none[2]),
    ]
    assert len(events) == 1 + 2 * len(names) + len(spans) + 1 + len(counters)


def test_an_empty_run_has_lanes_only() -> None:
    events = list(trace_events(RunStats(0.0, {})))
    assert {e["ph"] for e in events} == {"M"}
    assert list(rows_by_name(events).values()) == ALWAYS


def test_a_run_over_pcie_has_copy_streams(tmp_path: Path) -> None:
    """Transfers of a reader and the stream behind it overlap: no lane has spans that cross."""
    step = StepStats("decode", start_s=1.0, end_s=6.0)
    step.events += [
        TimeSpan("transfer", 2.0, 2.5, 0, 1, moved_bytes=1),
        TimeSpan("transfer", 2.5, 3.0, 0, 2, moved_bytes=1),
        TimeSpan("transfer", 1.0, 3.0, 1, 1, moved_bytes=1, read_bytes=512, reader=0),
        TimeSpan("transfer", 2.0, 4.0, 1, 2, moved_bytes=1, read_bytes=512, reader=0),
        TimeSpan("transfer", 3.0, 5.0, 1, 3, moved_bytes=1, read_bytes=512, reader=0),
        TimeSpan("transfer", 1.5, 5.0, 1, 4, moved_bytes=1, read_bytes=512, reader=10),
        TimeSpan("transfer", 1.5, 5.0, 1, 5, moved_bytes=1, read_bytes=512, reader=1),
    ]
    run = RunStats(1.0, {})
    run.record(step)
    events = written(run, tmp_path / "trace.json", "PCIe")
    names = rows_by_name(events)
    lanes: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event.get("cat") == "transfer":
            lanes[names[event["tid"]]].append(event["name"])
    assert {name: found for name, found in lanes.items() if name not in ALWAYS} == {
        "copy stream 0": ["0.1", "0.2"],
        "disk reader 0 and copy": ["1.1", "1.3"],
        "disk reader 0 and copy, beside (1)": ["1.2"],
        "disk reader 1 and copy": ["1.5"],
        "disk reader 10 and copy": ["1.4"],
    }


def test_a_transfer_of_before_begins_at_zero(tmp_path: Path) -> None:
    run = run_by_hand()
    run.steps[0].events.append(TimeSpan("transfer", 9.0, 10.5, 0, 1, moved_bytes=1, reader=0))
    events = written(run, tmp_path / "trace.json")
    spans = {(e["name"], e["cat"]): e["ts"] for e in events if e["ph"] == "X"}
    assert spans["0.1", "transfer"] == 0
    assert spans["prefill 0", "step"] == 1e6


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ph": "Y"}, "its phase is 'Y'"),
        ({"dur": None}, "dur is None"),
        ({"dur": -1.0}, "dur is -1.0"),
        ({"ts": float("nan")}, "ts is nan"),
        ({"ts": "1"}, "ts is '1'"),
        ({"tid": 1.0}, "tid is 1.0"),
        ({"pid": True}, "pid is True"),
        ({"name": ""}, "name is ''"),
        ({"args": []}, "args is []"),
        ({"color": "red"}, "it has 'color', which phase X has not"),
        ({"tid": 99}, "the lane (1, 99) has no name"),
        ({"ph": "i", "s": "x", "dur": ...}, "its scope is 'x'"),
        ({"ph": "C", "args": {}, "dur": ..., "cat": ...}, "a counter has no series"),
        ({"ph": "C", "args": {"n": "1"}, "dur": ..., "cat": ...}, "series 'n' is '1'"),
        ({"ph": "M", "dur": ..., "ts": ...}, "there is no metadata 'prefill 0'"),
        (
            {"ph": "M", "name": "thread_name", "args": {"name": 1}, "dur": ..., "ts": ...},
            "name is 1",
        ),
        ({"dur": ...}, "it lacks ['dur']"),
    ],
)
def test_what_breaks_the_format_is_found(change: Row, fault: str) -> None:
    content = {"traceEvents": list(trace_events(run_by_hand())), "displayTimeUnit": "ms"}
    assert faults(content) == []
    broken = copy.deepcopy(content)
    event = next(e for e in broken["traceEvents"] if e["ph"] == "X")  # type: ignore[attr-defined]
    event |= change
    for key in [key for key, value in event.items() if value is ...]:
        del event[key]
    assert any(fault in found for found in faults(broken)), faults(broken)


def test_spans_that_cross_are_found() -> None:
    def span(start: float, end: float, tid: int = 1) -> Row:
        return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": end - start}

    within = [span(0, 10), span(0, 4), span(4, 10), span(5, 6), span(10, 12), span(3, 11, tid=2)]
    assert crossing(within) == []
    assert crossing([*within, span(9, 11)]) == [
        (span(4, 10), span(9, 11)),
        (span(9, 11), span(10, 12)),
    ]
    assert crossing([span(0, 1), span(0.999, 2)]) == [(span(0, 1), span(0.999, 2))]


def spans_of(events: list[Row], kind: str, phase: str, run: RunStats) -> list[Row]:
    """Complete events of a kind that the record of a step of this phase has."""
    return [
        e
        for e in events
        if e["ph"] == "X" and e["cat"] == kind and run.steps[e["args"]["step"]].phase == phase
    ]


def check_sums(events: list[Row], run: RunStats, stats: Row) -> None:
    """What the file says adds up to the statistics of its run.

    Both ends of a span are rounded to a nanosecond, so that it is off by one at most.
    """
    assert run.trimmed == 0
    names = {"draft": "draft_s", "verify": "verify_s", "stall": "stall_s", "transfer": "transfer_s"}
    for phase in ("prefill", "decode"):
        for kind, name in names.items():
            spans = spans_of(events, kind, phase, run)
            summed = sum(nanoseconds(e["dur"]) for e in spans)
            assert abs(summed - run.total(name, phase) * 1e9) <= len(spans) + 1, (kind, phase)
        steps = spans_of(events, "step", phase, run)
        assert len(steps) == sum(step.phase == phase for step in run.steps)
        in_steps_s = sum(nanoseconds(e["dur"]) for e in steps) / 1e9
        counted = {e["ts"]: e["args"] for e in events if e["name"] == "bytes moved"}
        moved = sum(sum(counted[e["ts"]].values()) for e in steps)
        brought = spans_of(events, "transfer", phase, run)
        if phase == "prefill":
            assert in_steps_s == pytest.approx(stats["prefill_s"], abs=2e-9)
            assert moved == stats["prefill_moved_bytes"]
        else:
            tokens = sum(step.emitted for step in run.decode)
            tpot_ms = in_steps_s / tokens * 1e3
            assert tpot_ms == pytest.approx(stats["tpot_ms"], abs=1e-6 * len(steps))
            assert moved == stats["moved_bytes"]
            ahead = sum(counted[e["ts"]]["ahead"] for e in steps)
            assert ahead == stats["ahead_bytes"]
        assert moved == sum(e["args"]["moved_bytes"] for e in brought)
        assert sum(e["args"]["read_bytes"] for e in brought) == run.total("read_bytes", phase)
        asked = {e["ts"]: e["args"] for e in events if e["name"] == "experts asked for"}
        assert sum(asked[e["ts"]]["hits"] for e in steps) == run.total("hits", phase)
        requests = run.total("requests", phase)
        assert sum(sum(asked[e["ts"]].values()) for e in steps) == requests
    rejected = sum(e["args"]["rejected"] for e in events if e["name"] == "bytes of rejected tokens")
    assert rejected == stats["rejected_bytes"]
    decisions = [e["args"] for e in events if e["ph"] == "i"]
    chosen = [(e["draft_length"], e["ground"], e["reason"]) for e in decisions]
    assert chosen == [(step.draft_length, step.ground, step.reason) for step in run.decode]


def within(inner: list[Row], outer: list[Row]) -> bool:
    """Whether each span of the one list lies in some span of the other."""
    bounds = [(nanoseconds(e["ts"]), nanoseconds(e["ts"]) + nanoseconds(e["dur"])) for e in outer]
    return all(
        any(
            start <= nanoseconds(e["ts"]) and nanoseconds(e["ts"]) + nanoseconds(e["dur"]) <= end
            for start, end in bounds
        )
        for e in inner
    )


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
        for _ in range(2):  # behind the first one transfers may still be under way
            result = generator.generate("hello there", max_new_tokens=16, ignore_eos=True)
        run = generator.last_run
    finally:
        generator.close()
    assert run is not None
    assert run.summary() == result.stats
    events = written(run, tmp_path / "trace.json")
    check_sums(events, run, result.stats)
    names = rows_by_name(events)
    readers = set(names.values()) - set(ALWAYS)
    assert readers
    assert readers <= {"reader 0", "reader 1", "reader 2"}
    of_lane = {
        name: [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        for tid, name in names.items()
    }
    steps = of_lane["steps"]
    assert [e["name"].split()[0] for e in steps] == ["prefill"] + ["decode"] * (len(steps) - 1)
    assert len(steps) == len(run.steps) > 3
    for lane in ("draft", "verify", "verify by layer", *readers):
        assert of_lane[lane], lane
    # Every draft and verification lies in its step, every layer in a verification.
    assert within(of_lane["draft"], steps)
    assert within(of_lane["verify"], steps)
    assert within(of_lane["verify by layer"], of_lane["verify"])


def on_a_device_with_streams(model: Path, budget: str, seed: int, **options: Any) -> RunStats:
    with host_device(HostDevice(seed)):
        generator = Generator.from_pretrained(
            *(model, budget),
            device="cuda",
            prefetch="three-phase",
            reader_threads=2,
            host_compute="none",
            **options,
        )
        generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        generator.close()
    assert generator.last_run is not None
    return generator.last_run


@pytest.mark.wide
def test_a_run_on_a_device_with_streams(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    run = on_a_device_with_streams(tiny("qwen3_moe"), "2MiB", 3, draft_length=3)
    events = written(run, tmp_path / "trace.json", "PCIe")
    check_sums(events, run, run.summary())
    names = rows_by_name(events)
    assert list(names.values()) == [*ALWAYS, "copy stream 0"]
    lanes = {names[e["tid"]] for e in events if e["ph"] == "X"}
    assert {"draft", "verify", "verify by layer", "copy stream 0"} <= lanes


@pytest.mark.wide
def test_experts_from_the_disk_on_a_device_with_streams(tmp_path: Path) -> None:
    sizes = {"num_experts": 32, "num_experts_per_tok": 4}
    model = write_model(tmp_path / "model", "olmoe", torch.bfloat16, **sizes)
    run = on_a_device_with_streams(model, "700KiB", 5, draft_length=0, host_budget="700KiB")
    events = written(run, tmp_path / "trace.json", "PCIe")
    check_sums(events, run, run.summary())
    lanes = {name.partition(",")[0] for name in rows_by_name(events).values()} - set(ALWAYS)
    assert "copy stream 0" in lanes
    by_disk = lanes - {"copy stream 0"}
    assert by_disk
    assert by_disk <= {"disk reader 0 and copy", "disk reader 1 and copy"}


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
    assert json.loads(target.read_text())["traceEvents"] == list(trace_events(run_by_hand()))
