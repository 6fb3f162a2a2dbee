"""What a run measured, on a clock that moves when told to."""

import math
import random
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest

from speq.stats import (
    BUDGET_FIGURES,
    FIGURES,
    LAYER_FIGURES,
    MAX_EVENTS,
    ApproximationStats,
    LayerStats,
    Recorder,
    RunStats,
    StepStats,
    TimeSpan,
    length,
    merge,
    overlap,
    ratio,
)


class Clock:
    """Time in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_step_lasts_from_begin_to_finish() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    begun = recorder.begin("decode")
    clock.now += 2.5
    finished = recorder.finish()
    assert finished is begun
    assert (finished.phase, finished.start_s, finished.end_s) == ("decode", 100.0, 102.5)
    clock.now += 1
    assert recorder.begin("prefill") is not begun
    assert recorder.step.start_s == 103.5


def test_a_run_is_told_of_the_steps_that_are_finished() -> None:
    recorder = Recorder(Clock())
    recorder.begin("decode")
    recorder.finish()  # of no run
    first, second = RunStats(0.0, {}), RunStats(0.0, {})
    assert recorder.begin_run(first) is first
    prefill = recorder.begin("prefill")
    assert first.steps == []
    recorder.finish()
    decode = recorder.begin("decode")
    recorder.finish()
    recorder.begin_run(second)
    recorder.begin("decode")
    assert list(map(id, first.steps)) == [id(prefill), id(decode)]
    assert second.steps == []


def test_timed_blocks_add_up_by_kind() -> None:
    clock = Clock(0.0)
    recorder = Recorder(clock)
    step = recorder.begin("decode")
    for kind, seconds in [
        ("draft", 0.25),
        ("verify", 1.0),
        ("transfer", 0.5),
        ("stall", 0.125),
        ("transfer", 2.0),
        ("layer", 64.0),
        ("prefill", 32.0),
    ]:
        with recorder.timed(kind):
            clock.now += seconds
    assert (step.draft_s, step.verify_s, step.transfer_s, step.stall_s) == (0.25, 1.0, 2.5, 0.125)
    assert [event.kind for event in step.events].count("transfer") == 2
    assert sum(event.duration_s for event in step.events) == clock.now


def test_timed_block_says_what_it_was_about() -> None:
    clock = Clock(10.0)
    recorder = Recorder(clock)
    step = recorder.begin("decode")
    with recorder.timed("verify"):
        clock.now = 11.0
        with recorder.timed("transfer", 3, 7, moved_bytes=640):
            clock.now = 14.0
        clock.now = 15.0
    assert step.events == [
        TimeSpan("transfer", 11.0, 14.0, layer=3, expert=7, moved_bytes=640),
        TimeSpan("verify", 10.0, 15.0),
    ]
    assert step.moved_bytes == 640


def test_block_that_fails_is_timed_all_the_same() -> None:
    clock = Clock(0.0)
    recorder = Recorder(clock)
    step = recorder.begin("decode")
    with pytest.raises(RuntimeError, match="broken"), recorder.timed("stall"):
        clock.now = 4.0
        raise RuntimeError("broken")
    assert step.stall_s == 4.0


def test_events_belong_to_the_step_under_way() -> None:
    recorder = Recorder(Clock())
    first = recorder.begin("prefill")
    recorder.add(TimeSpan("transfer", 1.0, 2.0, moved_bytes=5))
    second = recorder.begin("decode")
    recorder.add(TimeSpan("transfer", 2.0, 4.0, moved_bytes=7))
    recorder.add(TimeSpan("transfer", 4.0, 5.0, moved_bytes=8))
    assert (first.moved_bytes, len(first.events), first.transfer_s) == (5, 1, 1.0)
    assert (second.moved_bytes, len(second.events), second.transfer_s) == (15, 2, 3.0)


def test_requests_and_hits_by_layer() -> None:
    recorder = Recorder(Clock())
    step = recorder.begin("decode")
    recorder.served(0, requests=4, hits=1)
    recorder.served(3, requests=2, hits=2)
    recorder.served(0, requests=8, hits=0, late=5)
    assert (step.requests, step.hits, step.late, step.layers) == (14, 3, 5, 3)
    assert step.covered == 1 / 4 + 1.0
    assert step.by_layer == {
        0: LayerStats(passes=2, covered=1 / 4, requests=12, hits=1, late=5),
        3: LayerStats(passes=1, covered=1.0, requests=2, hits=2),
    }


def test_bytes_and_waits_by_layer_and_by_cause() -> None:
    recorder = Recorder(Clock())
    step = recorder.begin("decode")
    recorder.add(TimeSpan("transfer", 0.0, 1.0, 2, 5, moved_bytes=10, read_bytes=12, reader=0))
    recorder.add(TimeSpan("transfer", 0.0, 2.0, 2, 6, moved_bytes=20, ahead=True, reader=1))
    recorder.add(TimeSpan("transfer", 2.0, 3.0, 4, 5, moved_bytes=40, ahead=True, reader=1))
    recorder.add(TimeSpan("stall", 0.0, 0.5, 2, 5))
    recorder.add(TimeSpan("stall", 0.5, 2.0, 2, 6, ahead=True))
    recorder.add(TimeSpan("stall", 2.5, 3.0, 4, 5, ahead=True))
    recorder.add(TimeSpan("layer", 0.0, 9.0, 2))  # moves nothing
    recorder.used(2)
    recorder.used(4, 3)
    recorder.wasted(4, 2)
    assert (step.moved_bytes, step.ahead_bytes, step.read_bytes) == (70, 60, 12)
    assert (step.stall_s, step.late_s) == (2.5, 2.0)
    assert (step.used, step.wasted) == (4, 2)
    assert step.by_layer == {
        2: LayerStats(used=1, demand_bytes=10, ahead_bytes=20, stall_s=2.0, late_s=1.5),
        4: LayerStats(used=3, wasted=2, ahead_bytes=40, stall_s=0.5, late_s=0.5),
    }


def test_bytes_for_rejected_tokens() -> None:
    """Every transfer of such an expert counts, once for each time that it was made."""
    recorder = Recorder(Clock())
    step = recorder.begin("decode")
    for layer, expert in [(0, 1), (0, 2), (1, 1), (0, 1)]:
        recorder.add(TimeSpan("transfer", 0.0, 1.0, layer, expert, moved_bytes=1 << expert))
    recorder.add(TimeSpan("stall", 0.0, 1.0, 0, 1))
    recorder.rejected({(0, 1), (1, 2), (7, 7)})
    assert step.rejected_bytes == 2 + 2
    assert {layer: figures.rejected_bytes for layer, figures in step.by_layer.items()} == {
        0: 4,
        1: 0,
    }


def test_spans_are_merged_where_they_touch() -> None:
    assert merge([]) == []
    assert merge([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert merge([(0, 9), (2, 3), (4, 5)]) == [(0, 9)]
    assert merge([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (3.5, 3.7)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_overlap_by_hand() -> None:
    found = overlap([(0.0, 2.0), (3.0, 9.0)], [(1.0, 4.0), (8.0, 10.0)])
    assert found == [(1.0, 2.0), (3.0, 4.0), (8.0, 9.0)]


def test_overlap_against_counting_ticks() -> None:
    """On whole seconds, where each second is within both or not."""
    rng = random.Random(4)
    for _ in range(300):
        lists = []
        for _ in range(2):
            starts = [rng.randint(0, 30) for _ in range(rng.randint(0, 6))]
            lists.append([(at, at + rng.randint(1, 5)) for at in starts])
        ticks = [{tick for span in spans for tick in range(*span)} for spans in lists]
        one, other = (merge(spans) for spans in lists)
        shared = overlap(one, other)
        assert shared == overlap(other, one)
        for found, expected in zip(
            (one, other, shared), (*ticks, ticks[0] & ticks[1]), strict=True
        ):
            assert length(found) == len(expected)
            assert {tick for span in found for tick in range(*map(int, span))} == expected
            assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert all(a[1] < b[0] for spans in (one, other) for a, b in pairwise(spans))


def test_link_time_and_how_much_of_it_was_waited_for() -> None:
    """Two readers at once are one link; a wait in which nothing is moved is not exposed."""
    recorder = Recorder(Clock())
    recorder.begin("decode")
    for start_s, end_s in [(0, 4), (2, 6), (10, 12)]:
        recorder.add(TimeSpan("transfer", start_s, end_s))
    for start_s, end_s in [(3, 5), (5, 8), (11, 11.5)]:
        recorder.add(TimeSpan("stall", start_s, end_s, 0, 0))
    step = recorder.finish()
    assert (step.transfer_s, step.link_s) == (4 + 4 + 2, 6 + 2)
    assert (step.stall_s, step.exposed_s) == (5.5, 3 + 0.5)


def test_ratio_of_nothing_is_none() -> None:
    assert ratio(3, 4) == 0.75
    assert ratio(0, 4) == 0
    assert ratio(3, 0) is None


def run_of(steps: list[StepStats], start_s: float = 50.0) -> RunStats:
    stats = RunStats(start_s, {"budget": 1000, "slots": 300})
    for step in steps:
        stats.record(step)
    return stats


PREFILL = StepStats(
    "prefill",
    emitted=1,
    requests=30,
    hits=12,
    layers=3,
    covered=1.2,
    moved_bytes=9000,
    read_bytes=9800,
    transfer_s=100.0,
    stall_s=100.0,
    start_s=51.0,
    end_s=54.5,
)
DECODE = [
    StepStats(
        "decode",
        draft_length=4,
        branches=3,
        given_up=2,
        accepted=2,
        emitted=3,
        requests=20,
        hits=15,
        layers=3,
        covered=2.25,
        moved_bytes=500,
        ahead_bytes=300,
        rejected_bytes=200,
        late=3,
        used=4,
        wasted=2,
        read_bytes=600,
        named=22,
        choices=24,
        draft_s=0.5,
        verify_s=1.5,
        transfer_s=0.25,
        link_s=0.1875,
        exposed_s=0.0625,
        stall_s=0.125,
        late_s=0.03125,
        start_s=55.0,
        end_s=57.0,
    ),
    StepStats(
        "decode",
        draft_length=2,
        accepted=2,
        emitted=3,
        requests=10,
        hits=10,
        layers=3,
        covered=3.0,
        named=18,
        choices=24,
        draft_s=0.25,
        verify_s=1.0,
        start_s=58.0,
        end_s=59.25,
    ),
    # Plainly decoded.
    StepStats(
        "decode",
        emitted=1,
        requests=6,
        hits=2,
        layers=3,
        covered=1.0,
        moved_bytes=400,
        read_bytes=405,
        verify_s=0.75,
        transfer_s=0.5,
        link_s=0.5,
        exposed_s=0.5,
        stall_s=0.5,
        start_s=60.0,
        end_s=60.75,
    ),
]


def test_every_figure_has_a_meaning() -> None:
    figures = run_of([PREFILL, *DECODE]).summary()
    assert set(figures) == set(FIGURES)
    assert list(LAYER_FIGURES) == ["layer", *LayerStats.__slots__]
    assert list(BUDGET_FIGURES) == [*ApproximationStats().summary()]


def test_summary_of_a_run() -> None:
    run = run_of([PREFILL, *DECODE])
    run.verified_bytes, run.verified_s = 700, 0.25
    figures = run.summary()
    decode_tokens = 3 + 3 + 1
    expected: dict[str, Any] = {
        "new_tokens": 1 + decode_tokens,
        "ttft_ms": (54.5 - 50.0) * 1000,
        "tpot_ms": (2.0 + 1.25 + 0.75) * 1000 / decode_tokens,
        "steps": 3,
        "draft_length_mean": (4 + 2 + 0) / 3,
        "batch_mean": 1,
        "side_steps": 0,
        "branches_mean": 3 / 3,
        "given_up_mean": 2 / 3,
        # Each step adds one token of the exact model's own to those it accepted.
        "accept_length_mean": ((2 + 1) + (2 + 1) + (0 + 1)) / 3,
        "acceptance_rate": (2 + 2) / (4 + 2),
        "route_recall": (22 + 18) / (24 + 24),
        "hit_rate": (15 + 10 + 2) / (20 + 10 + 6),
        "coverage": (2.25 + 3.0 + 1.0) / 9,
        "moved_bytes": 500 + 400,
        "ahead_bytes": 300,
        "read_bytes": 600 + 405,
        "rejected_bytes": 200,
        "late_rate": 3 / (20 + 10 + 6),
        "used": 4,
        "wasted": 2,
        "moved_bytes_per_token": (500 + 400) / decode_tokens,
        "stall_s": 0.125 + 0.5,
        "late_s": 0.03125,
        "draft_s": 0.5 + 0.25,
        "verify_s": 1.5 + 1.0 + 0.75,
        "transfer_s": 0.25 + 0.5,
        "link_s": 0.1875 + 0.5,
        "hidden_share": 0.125 / 0.6875,
        "prefill_read_bytes": 9800,
        "prefill_stall_s": 100.0,
        "prefill_s": 3.5,
        "verified_bytes": 700,
        "verified_s": 0.25,
        "prefill_moved_bytes": 9000,
        "prefill_hit_rate": 12 / 30,
        "cached_tokens": 0,
        "select_s": 0.0,
        "audit_s": 0.0,
        "host_s": 0.0,
        "host_experts": 0,
        "peer_experts": 0,
    }
    assert figures.pop("memory") == {"budget": 1000, "slots": 300}
    assert figures.pop("layers") == []
    assert (figures.pop("codec"), figures.pop("dense")) == ("raw", "raw")
    assert figures.pop("sums") == "fast"
    assert (figures.pop("planned"), figures.pop("card")) == (None, None)
    assert figures.pop("reader_threads") == 0
    assert figures.pop("budget") is None
    assert figures == pytest.approx(expected)


def test_layers_of_a_run_are_those_of_its_decoding() -> None:
    prefill = StepStats("prefill", by_layer={0: LayerStats(passes=1, requests=30)})
    first = StepStats("decode")
    first.layer(1).add(LayerStats(passes=1, covered=0.5, requests=4, hits=2, ahead_bytes=8))
    second = StepStats("decode")
    second.layer(1).add(LayerStats(passes=1, covered=1.0, requests=2, hits=2, stall_s=0.25))
    second.layer(0).add(LayerStats(passes=1, requests=3, late=1, demand_bytes=5, late_s=0.5))
    run = run_of([prefill, first, second])
    both = LayerStats(passes=2, covered=1.5, requests=6, hits=4, ahead_bytes=8, stall_s=0.25)
    one = LayerStats(passes=1, requests=3, late=1, demand_bytes=5, late_s=0.5)
    assert run.layers == {0: one, 1: both}
    assert run.summary()["layers"] == [{"layer": 0} | asdict(one), {"layer": 1} | asdict(both)]
    # A step's own figures are not the run's.
    assert first.by_layer[1].requests == 4


def test_time_between_steps_is_nobodys() -> None:
    """A reader who pauses between tokens does not make the model slower."""
    paused = [StepStats("decode", emitted=2, start_s=at, end_s=at + 1) for at in (0.0, 1000.0)]
    assert run_of(paused).summary()["tpot_ms"] == pytest.approx(500)


def test_figures_that_do_not_exist_are_none() -> None:
    nothing = run_of([]).summary()
    undefined = {
        "ttft_ms",
        "tpot_ms",
        "draft_length_mean",
        "batch_mean",
        "branches_mean",
        "given_up_mean",
        "accept_length_mean",
        "acceptance_rate",
        "route_recall",
        "hit_rate",
        "coverage",
        "moved_bytes_per_token",
        "late_rate",
        "hidden_share",
        "prefill_hit_rate",
        "card",
        "planned",
        "budget",
    }
    assert {name for name, value in nothing.items() if value is None} == undefined
    assert nothing["new_tokens"] == nothing["steps"] == nothing["moved_bytes"] == 0

    only_prefill = run_of([PREFILL]).summary()
    assert {name for name, value in only_prefill.items() if value is None} == undefined - {
        "ttft_ms",
        "prefill_hit_rate",
    }

    plain = run_of([PREFILL, DECODE[2]]).summary()
    assert {name for name, value in plain.items() if value is None} == {
        "acceptance_rate",
        "route_recall",
        "card",
        "planned",
        "budget",
    }
    assert plain["accept_length_mean"] == 1
    assert plain["draft_length_mean"] == 0


def test_acceptance_rate_of_nothing_accepted_is_zero() -> None:
    rejected = StepStats("decode", draft_length=3, emitted=1, start_s=0.0, end_s=1.0)
    assert run_of([rejected]).summary()["acceptance_rate"] == 0


def test_events_of_old_steps_are_dropped() -> None:
    stats = run_of([])
    each = 100
    fitting, extra = MAX_EVENTS // each, 3
    for at in range(fitting + extra):
        step = StepStats("decode", emitted=1, moved_bytes=2, start_s=at, end_s=at + 0.5)
        # Layers count as an event each.
        step.events += [TimeSpan("layer", at, at + 0.5)] * (each - 2)
        step.layer(0).add(LayerStats(hits=1))
        step.layer(1).add(LayerStats(hits=2))
        stats.record(step)
        assert stats.trimmed == max(0, at + 1 - fitting)
    kept = [(len(step.events), len(step.by_layer)) for step in stats.steps]
    assert kept == [(0, 0)] * extra + [(each - 2, 2)] * fitting
    # Sums go on.
    assert [stats.layers[layer].hits for layer in (0, 1)] == [
        fitting + extra,
        2 * (fitting + extra),
    ]
    figures = stats.summary()
    assert figures["steps"] == fitting + extra
    assert figures["moved_bytes"] == 2 * (fitting + extra)
    assert figures["tpot_ms"] == pytest.approx(500)


def test_what_a_budget_cost() -> None:
    """Wilson's interval of 1 in 4, and the interval of a mean, worked out by hand."""
    steps = [replace(step) for step in DECODE]
    steps[0].approximation = ApproximationStats(1, 8, 6, 3.0, 2.0, 3, 1, 0.6, 0.36)
    steps[1].approximation = ApproximationStats(1, 4, 4, 1.0, 1.0, 1, 0, 0.2, 0.04)
    found = run_of([PREFILL, *steps]).summary()["budget"]
    assert (found["verifications"], found["natural"], found["served"]) == (2, 12, 10)
    assert found["dropped_share"] == pytest.approx(1 / 4)
    assert (found["audited"], found["differing"], found["differing_share"]) == (4, 1, 0.25)
    z2 = 1.96**2
    half = 1.96 * math.sqrt(0.25 * 0.75 / 4 + z2 / 64)
    ends = [(0.25 + z2 / 8 - half) / (1 + z2 / 4), (0.25 + z2 / 8 + half) / (1 + z2 / 4)]
    assert found["differing_interval"] == pytest.approx(ends)
    assert found["nats"] == pytest.approx(0.2)
    deviation = math.sqrt((0.4 - 4 * 0.2**2) / 3)
    ends = [0.2 - 1.96 * deviation / 2, 0.2 + 1.96 * deviation / 2]
    assert found["nats_interval"] == pytest.approx(ends)
