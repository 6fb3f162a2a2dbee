"""`speq bench hit-rate` and `speq bench schedule`: their settings, their sums and their rows."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from speq import SpeqError
from speq.bench.replay import hit_rate
from speq.bench.replay.replay import Times
from speq.bench.runs import schedule
from speq.bench.runs.schedule import Sample
from speq.bench.settings import shares as shares_of
from speq.experts.pack import pack
from speq.measure.route_trace import RouteTrace
from speq.models.opened import open_model
from speq.stats import RunStats, StepStats, TimeSpan
from tests.helpers.paths import ROUTES
from tests.helpers.told import Told
from tests.helpers.traces import DRAFTED

Folder = Callable[[str], Path]

TIMES = Times(
    draft_layer_s=1e-3, layer_s=2e-3, expert_s=2e-4, transfer_s=1e-3, begun=2, moved_bytes=1000
)


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    return path


def hit_rate_settings(prompts: Path | None, **changes: Any) -> hit_rate.Settings:
    settings = hit_rate.Settings(
        memory_budget="64MiB",
        draft_length=3,
        prompts=prompts,
        num_prompts=2,
        max_new_tokens=12,
        beside=None,
        beside_budget=None,
    )
    return replace(settings, **changes)


@pytest.mark.parametrize(
    ("experts", "top_k", "expected"),
    [
        (64, 4, [6, 16, 32]),
        (64, 8, [8, 16, 32]),
        (32, 4, [4, 8, 16]),
        (128, 8, [12, 32, 64]),
        # Too few for three: one token needs more than the scaled ones.
        (8, 3, [3, 4]),
        (8, 6, [6]),
        (6, 2, [2, 3]),
    ],
)
def test_capacities_hold_a_token(experts: int, top_k: int, expected: list[int]) -> None:
    trace = replace(DRAFTED, num_experts=experts, top_k=top_k)
    assert hit_rate.capacities(trace) == expected


def test_slots_that_a_draft_takes(tiny: Folder) -> None:
    """Of qwen3_moe: 8 experts of 64 x 32, in float32 24,576 bytes each, which are whole blocks."""
    # gate and up: 64 rows of 64 half bytes and one float16 scale; down: 64 rows of 32 and one.
    draft_bytes = 64 * (32 + 2) + 64 * (16 + 2)
    found = hit_rate.draft_slots(str(tiny("qwen3_moe")))
    assert found == pytest.approx(8 * draft_bytes / 24576)


def test_times_of_a_run_by_hand() -> None:
    """Of two steps of two layers: five tokens drafted, ten experts asked for."""
    first = StepStats("decode", draft_length=3, requests=6, draft_s=1.2, verify_s=4.0, stall_s=0.5)
    first.events += [TimeSpan("layer", 0.0, 1.0, 0), TimeSpan("layer", 1.5, 3.0, 1)]
    second = StepStats("decode", draft_length=2, requests=4, draft_s=0.8, verify_s=3.0)
    second.events += [TimeSpan("layer", 0.0, 0.5, 0), TimeSpan("layer", 1.0, 1.5, 1)]
    second.events.append(TimeSpan("transfer", 0.0, 9.0, 0, 0))
    run = RunStats(0.0, {})
    run.record(first)
    run.record(second)
    found = hit_rate.measured(run, DRAFTED, 0.25, 77)
    assert asdict(found) == pytest.approx(
        {
            "draft_layer_s": 2.0 / (5 * 2),
            "layer_s": (7.0 - 3.5) / 4,
            "expert_s": (3.5 - 0.5) / 10,
            "transfer_s": 0.25,
            "begun": 2,
            "moved_bytes": 77,
        }
    )


@pytest.fixture(scope="module")
def some_steps() -> RouteTrace:
    trace = RouteTrace.read(ROUTES)
    return replace(trace, steps=trace.steps[:10])


def test_rows_of_the_recorded_trace(some_steps: RouteTrace) -> None:
    slots, draft_slots = 8, 5.3
    rows = {
        policy: hit_rate.row(some_steps, TIMES, None, policy, slots, draft_slots)
        for policy in hit_rate.SYSTEMS
    }
    lasted = sum(step.emitted for step in some_steps.steps)
    for policy, row in rows.items():
        assert (row["policy"], row["slots"]) == (policy, slots)
        assert row["coverage_in_time_beside"] is None
        for name in ("coverage_at_start", "coverage_in_time", "request_hit_rate"):
            assert 0 < row[name] < 1
        assert row["moved_bytes"] > 0
        assert row["moved_bytes"] % TIMES.moved_bytes == 0
        assert row["wasted"] == 0 or hit_rate.SYSTEMS[policy][1] != "none"
    # A tenth of the steps only warms up: of those with drafts one, of single tokens as many.
    warm = len(some_steps.plain().steps) // 10
    assert rows["lru"]["moved_bytes_per_token"] == pytest.approx(
        rows["lru"]["moved_bytes"] / (lasted - warm)
    )
    emitted = lasted - some_steps.steps[0].emitted
    assert rows["speculative"]["moved_bytes_per_token"] == pytest.approx(
        rows["speculative"]["moved_bytes"] / emitted
    )
    assert [row["draft_length"] for row in rows.values()] == [0, 0, 8, 8, 8]
    # 13.3 slots a layer: the draft's memory is LRU's.
    assert [row["total_slots"] for row in rows.values()] == [64, int(13.3 * 8), 64, 64, 64]
    assert rows["lru-scaled"]["coverage_in_time"] > rows["lru"]["coverage_in_time"]
    assert rows["speculative"]["coverage_in_time"] > rows["single-sooner"]["coverage_in_time"]


def test_no_row_has_more_slots_than_experts(some_steps: RouteTrace) -> None:
    row = hit_rate.row(some_steps, TIMES, None, "lru-scaled", 30, 20.0)
    assert row["total_slots"] == 8 * 32


def test_the_same_routes_at_another_machines_speed(some_steps: RouteTrace) -> None:
    slow = replace(TIMES, transfer_s=5e-3)
    rows = [
        hit_rate.row(some_steps, TIMES, beside, "speculative", 8, 0.0) for beside in (TIMES, slow)
    ]
    assert rows[0]["coverage_in_time_beside"] == rows[0]["coverage_in_time"]
    assert rows[1]["coverage_in_time"] == rows[0]["coverage_in_time"]
    assert rows[1]["coverage_in_time_beside"] < rows[0]["coverage_in_time"] - 0.1


def test_hit_rate_of_a_model(
    tiny: Folder, two_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, packed = str(tiny("qwen3_moe")), tmp_path / "packed"
    opened = open_model(model)
    pack(opened.checkpoint, opened.store, packed)  # type: ignore[arg-type]
    opened.close()
    settings = hit_rate_settings(
        two_prompts, routes=tmp_path / "trace.json", beside=str(packed), beside_budget="64MiB"
    )
    target = tmp_path / "hit-rate.json"
    told = Told()
    report = hit_rate.run(model, settings, target, False, told)
    assert told.steps("replaying routes") == len(report.rows)
    assert not told.unfinished
    written = json.loads(target.read_text())
    assert written["rows"] == report.rows
    assert written["bench"] == "hit-rate"
    assert [(row["slots"], row["policy"]) for row in report.rows] == [
        (slots, policy)
        for slots in (3, 4)
        for policy in ("lru", "lru-scaled", "single-sooner", "single-later", "speculative")
    ]
    assert all(set(row) == set(report.rows[0]) for row in report.rows)
    assert {name for name, _ in hit_rate.COLUMNS.values()} <= set(report.rows[0])
    assert report.settings["tokens"] == 2 * (12 - 1)
    assert report.settings["times"]["moved_bytes"] == 3 * 64 * 32 * 4
    assert all(value > 0 for value in report.settings["times"].values())
    assert all(value > 0 for value in report.settings["times_beside"].values())
    trace = RouteTrace.read(tmp_path / "trace.json")
    assert (trace.num_experts, trace.top_k, trace.draft_length) == (8, 3, 3)
    # Neither file is replaced unasked, nor anything measured before that is known.
    monkeypatch.setattr(hit_rate, "record", None)
    for path, kept in ((target, None), (None, tmp_path / "trace.json")):
        with pytest.raises(SpeqError, match="exists already; choose another name or add --force"):
            hit_rate.run(model, replace(settings, routes=kept), path, force=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"draft_length": 0}, "draft_length is 0"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"num_prompts": 3}, "num_prompts is 3 and .* holds 2"),
        ({"beside": "some/model"}, "beside and beside_budget are given together"),
        ({"beside_budget": "1GiB"}, "beside and beside_budget are given together"),
    ],
)
def test_nonsense_is_refused(
    changes: dict[str, Any], sentence: str, two_prompts: Path, tiny: Folder
) -> None:
    with pytest.raises(SpeqError, match=sentence):
        hit_rate.run(str(tiny("qwen3_moe")), hit_rate_settings(two_prompts, **changes), None, False)


@pytest.mark.parametrize(
    ("text", "shares"), [("0.5", [0.5]), ("0.5,0.7", [0.5, 0.7]), (" 1 ,2e-1", [1.0, 0.2])]
)
def test_shares(text: str, shares: list[float]) -> None:
    assert shares_of("0.5,0.7").check("fractions", text) == tuple(shares)


@pytest.mark.parametrize(
    "text", ["", "0", "-0.5", "1e9", "half", "0.5,", "0.5;0.7", "nan", "inf", "1,0"]
)
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(SpeqError, match=r"fractions is .*; it must be"):
        shares_of("0.5,0.7").check("fractions", text)


def schedule_settings(prompts: Path | None, **changes: Any) -> schedule.Settings:
    settings = schedule.Settings(
        fractions="0.6",
        draft_length=2,
        prompts=prompts,
        num_prompts=2,
        max_new_tokens=6,
        rounds=2,
        reader_threads=2,
    )
    return replace(settings, **changes)


def test_budgets_are_shares_of_the_experts(tiny: Folder) -> None:
    model = str(tiny("qwen3_moe"))
    # 3 layers of 8 experts, 3 matrices of 64 x 32 in float32.
    experts = 3 * 8 * 3 * 64 * 32 * 4
    base = schedule.budget_for(model, 0.0, 0)
    assert schedule.budget_for(model, 1.0, 0) - base == experts
    assert schedule.budget_for(model, 0.25, 0) - base == experts // 4
    # Keys and values of 3 layers, 2 heads of 32 (a head of the family's own size).
    assert schedule.budget_for(model, 0.0, 10) - base == 10 * 3 * 2 * 2 * 32 * 4
    # What is left are the weights that no slot takes: all others of the checkpoint, and 16
    # frequencies of the rotary embedding, twice.
    tensors = load_file(Path(model) / "model.safetensors").values()
    assert base == sum(tensor.nbytes for tensor in tensors) - experts + 2 * 16 * 4


def generated(
    tpot_ms: float,
    new_tokens: int,
    hit_rate: float = 0.5,
    hidden_share: float = 0.0,
    **figures: float,
) -> RunStats:
    """A run whose first token is the prompt's, and all others of one step with a draft."""
    step = StepStats(
        "decode",
        emitted=new_tokens - 1,
        draft_length=4,
        accepted=3,
        requests=100,
        hits=round(100 * hit_rate),
        exposed_s=figures.get("link_s", 0.0) * (1 - hidden_share),
        start_s=5.0,
        end_s=5.0 + tpot_ms * (new_tokens - 1) / 1e3,
        **figures,  # type: ignore[arg-type]
    )
    prompt = StepStats("prefill", emitted=1, moved_bytes=10**6, stall_s=1.0, end_s=4.0)
    return RunStats(0.0, {}, steps=[prompt, step])


def sample(*runs: RunStats, link_s: float = 1e-3) -> Sample:
    return Sample.of(7, 10, link_s, runs)


def test_a_sample_by_hand() -> None:
    """Two texts of 11 and 5 tokens: 10 and 4 after the first of each."""
    made = sample(
        generated(100.0, 11, moved_bytes=900, wasted=3, link_s=2.0, hidden_share=0.25),
        generated(30.0, 5, moved_bytes=220, wasted=4, link_s=0.5, hidden_share=1.0),
        generated(0.0, 1, hit_rate=0.7),
    )
    assert made.tpot_ms == pytest.approx((100 * 10 + 30 * 4) / 14)
    assert made.moved_bytes == pytest.approx(1120 / 14)
    # Seven experts of 10 bytes came for nothing.
    assert made.useful_bytes == pytest.approx((1120 - 70) / 14)
    assert made.useful_ms == pytest.approx((1120 - 70) / 14)
    assert made.hidden_share == pytest.approx((0.5 + 0.5) / 2.5)
    assert (made.hit_rates, made.acceptance_rate) == ((0.5, 0.5, 0.7), 0.75)
    assert sample(generated(1.0, 2)).hidden_share == 1
    assert sample(generated(100.0, 11, stall_s=0.25)).stall_share == 0.25


def test_a_row_by_hand() -> None:
    """Three rounds; with everything in memory 50 ms."""
    resident = [sample(generated(time_ms, 11)) for time_ms in (40.0, 50.0, 60.0)]
    lru = [
        sample(generated(time_ms, 11, moved_bytes=2000, stall_s=0.5))
        for time_ms in (200.0, 100.0, 150.0)
    ]
    ahead = [
        # The link's floor: 80, 40 and 120 ms of useful bytes; that of memory is 50.
        sample(generated(100.0, 11, moved_bytes=810, wasted=1, stall_s=0.1, hit_rate=0.7)),
        sample(generated(90.0, 11, moved_bytes=400, stall_s=0.09, hit_rate=0.8)),
        sample(
            generated(150.0, 11, moved_bytes=600, stall_s=0.3, hit_rate=0.9, link_s=1.0,
                      hidden_share=0.5),
            link_s=2e-3,
        ),
    ]  # fmt: skip
    row = schedule.summarise(0.6, "three-phase", ahead, resident, lru)
    assert row == pytest.approx(
        {
            "fraction": 0.6,
            "system": "three-phase",
            "slots": 7,
            "tpot_ms": 100.0,
            "floor_ms": 80.0,
            "of_floor": 100 / 80,  # of 1.25, 1.8 and 1.25
            "of_lru": 0.9,  # of 0.5, 0.9 and 1
            "moved_bytes_per_token": 60.0,
            "moved_of_lru": 60 / 200,
            "useful_bytes_per_token": 60.0,
            "link_bytes_per_s": 1000.0,
            "stall_share": 0.1,  # of 0.1, 0.1 and 0.2
            "hidden_share": 1.0,
            "hit_rate": 0.8,
            "acceptance_rate": 0.75,
            "samples": 3,
        }
    )
    assert {name for name, _ in schedule.COLUMNS.values()} <= set(row)


def test_schedule_of_a_model(
    tiny: Folder, two_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "schedule.json"
    # Small experts: what a pass needs beside them is more than their own share.
    settings = schedule_settings(two_prompts, fractions="8", rounds=1)
    monkeypatch.setattr(schedule, "ALL", 12.0)
    told = Told()
    report = schedule.run(str(tiny("qwen3_moe")), settings, target, False, told)
    assert told.steps("measuring systems") == 4
    assert json.loads(target.read_text())["rows"] == report.rows
    assert [(row["fraction"], row["system"]) for row in report.rows] == [
        (12.0, "resident"),
        (8.0, "lru"),
        (8.0, "lookahead"),
        (8.0, "three-phase"),
    ]
    resident = report.rows[0]
    # It is compared with itself.
    assert resident["of_lru"] == 1
    for row in report.rows:
        assert row["samples"] == 1
        assert row["tpot_ms"] > 0
        assert row["floor_ms"] >= resident["tpot_ms"]
        assert row["slots"] <= 24
    with pytest.raises(SpeqError, match="exists already"):
        schedule.run(str(tiny("qwen3_moe")), settings, target, force=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fractions": "none"}, "fractions is 'none'"),
        ({"rounds": 0}, "rounds is 0"),
        ({"draft_length": -1}, "draft_length is -1"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"num_prompts": 9}, "num_prompts is 9 and .* holds 2"),
    ],
)
def test_nonsense_of_a_schedule_is_refused(
    changes: dict[str, Any], sentence: str, two_prompts: Path, tiny: Folder
) -> None:
    with pytest.raises(SpeqError, match=sentence):
        schedule.run(str(tiny("qwen3_moe")), schedule_settings(two_prompts, **changes), None, False)
