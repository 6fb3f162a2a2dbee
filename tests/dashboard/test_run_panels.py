"""Pictures of a run: the numbers of a record that was made by hand."""

import base64
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speq.dashboard.figures import mirrored_ticks
from speq.dashboard.page import render
from speq.dashboard.panel import Panel
from speq.dashboard.recording import Noted, step_record
from speq.dashboard.run_panels.overlap import busy, overlap_of
from speq.dashboard.run_panels.roofline import bandwidth_of
from speq.dashboard.run_panels.run_page import facts_of, page_of, panels_of
from speq.dashboard.run_panels.steps import parts_of
from speq.dashboard.run_panels.throughput import rates_of
from speq.dashboard.run_record import RunRecord
from speq.stats import StepStats
from tests.helpers.panels import check
from tests.helpers.run_records import DRAFTED, MIB, PLAIN, PROMPT, RUN, changed


def panel(name: str, run: RunRecord = RUN) -> Panel:
    (found,) = [each for each in panels_of(run) if each.name == name]
    return found


def traces(name: str, run: RunRecord = RUN) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in panel(name, run).data}


def test_what_holds_of_every_picture() -> None:
    found = panels_of(RUN)
    for each in found:
        check(each)
        assert not each.absent
    names = [each.name for each in found]
    assert len(set(names)) == len(names) == 13


@pytest.mark.parametrize(
    ("run", "absent"),
    [
        (
            changed(steps=[PROMPT], estimates=[], expected=None),
            {"steps", "bytes", "roofline", "draft-lengths", "positions", "layers", "misses"}
            | {"plan", "forecasts"},
        ),
        (
            changed(
                steps=[
                    replace(
                        PLAIN,
                        figures=PLAIN.figures | {"moved_bytes": 0, "link_ms": 0.0},
                        transfers=[],
                        layers=[[2, 2, 0, 0, 0, 0.0], [2, 2, 0, 0, 0, 0.0]],
                        forecast=None,
                    )
                ]
            ),
            {"throughput", "bytes", "roofline", "draft-lengths", "positions", "misses"}
            | {"forecasts"},
        ),
    ],
    ids=["only a prompt", "nothing moved"],
)
def test_what_is_not_there_says_so(run: RunRecord, absent: set[str]) -> None:
    found = panels_of(run)
    for each in found:
        check(each)
    assert {each.name for each in found if each.absent} == absent


def test_shares_of_bins_against_counting_moments() -> None:
    bins = 13
    found = overlap_of(RUN, bins)
    edges = found.edges_ms
    assert (edges[0], edges[-1]) == (10.0, 270.0)
    # A moment every hundredth of a millisecond.
    moments = np.arange(10.0, 270.0, 0.01) + 0.005

    def inside(spans: list[list[float]]) -> Any:
        return np.any([(moments > a) & (moments < b) for a, b, *_ in spans], axis=0)

    steps = inside([[s.start_ms, s.end_ms] for s in RUN.steps])
    moving = inside([span for s in RUN.steps for span in s.transfers])
    waiting = inside([span for s in RUN.steps for span in s.stalls])
    at = np.minimum((moments - 10.0) // 20.0, bins - 1).astype(int)

    def share(flags: Any) -> Any:
        return np.bincount(at, flags, bins) / np.bincount(at, minlength=bins)

    np.testing.assert_allclose(found.compute, share(steps & ~waiting), atol=1e-3)
    np.testing.assert_allclose(found.transfer, share(moving), atol=1e-3)
    np.testing.assert_allclose(found.exposed, share(moving & waiting), atol=1e-3)
    np.testing.assert_allclose(found.hidden, share(moving & ~waiting), atol=1e-3)
    np.testing.assert_allclose(found.waited, share(waiting), atol=1e-3)


def test_shares_of_bins_by_hand() -> None:
    assert busy([], np.array([0.0, 1.0, 2.0])).tolist() == [0.0, 0.0]
    assert busy([(0.5, 1.25)], np.array([0.0, 1.0, 2.0])).tolist() == [0.5, 0.25]


def test_the_picture_of_overlap_has_the_shares() -> None:
    found = overlap_of(RUN)
    up, hidden, exposed = panel("overlap").data
    np.testing.assert_allclose(up["y"], found.compute, atol=1e-4)
    np.testing.assert_allclose(hidden["y"], -found.hidden, atol=1e-4)
    np.testing.assert_allclose(exposed["y"], -found.exposed, atol=1e-4)
    assert exposed["marker"]["pattern"]["shape"] != hidden["marker"]["pattern"]["shape"]
    assert "disk" in panel("overlap").layout["yaxis"]["title"]["text"]
    assert "PCIe" in panel("overlap", changed(link="PCIe")).layout["yaxis"]["title"]["text"]


def test_parts_of_a_step_add_up() -> None:
    parts = parts_of(DRAFTED)
    assert (parts.draft, parts.verify, parts.stall, parts.rest) == (30.0, 50.0, 15.0, 5.0)
    assert (parts.hidden, parts.exposed) == (30.0, 10.0)
    for step in RUN.steps:
        each = parts_of(step)
        whole = each.draft + each.verify + each.prompt + each.stall + each.rest
        assert whole == pytest.approx(step.end_ms - step.start_ms)
    assert parts_of(PROMPT).prompt == 75.0
    found = traces("steps")
    assert {name: each["y"] for name, each in found.items()} == {
        "drafting": [30.0, 0],
        "verifying": [50.0, 40.0],
        "waiting for experts": [15.0, 8.0],
        "the rest": [5.0, 2.0],
        "reading from the disk, hidden": [-30.0, -0.0],
        "reading from the disk while waiting": [-10.0, -8.0],
    }
    assert panel("steps").table.rows[0] == [
        *(1, 2, 1, 2, 100.0, 30.0, 50.0, 15.0, 5.0, 30.0, 10.0, 55.0)
    ]


def test_a_step_has_a_part_on_the_host() -> None:
    """Of 50 ms that the host computed, the card waited for copies in 15."""
    times = {"draft_s": 0.03, "verify_s": 0.065, "host_s": 0.05, "stall_s": 0.015}
    ran = StepStats("decode", start_s=3.0, end_s=3.1, draft_length=2, **times)
    step = step_record(Noted(1, ran, [], {}, [], [], {}), 2.0, RUN.layers)
    parts = parts_of(step)
    assert (parts.draft, parts.verify, parts.host, parts.stall) == (30.0, 15.0, 35.0, 15.0)
    assert parts.rest == 5.0
    found = traces("steps", changed(steps=[step]))
    assert found["experts on the host"]["y"] == [35.0]


def test_throughput_loses_no_byte() -> None:
    edges_ms, rates = rates_of(RUN, 26)
    assert np.diff(edges_ms).tolist() == pytest.approx([10.0] * 26)
    moved = rates * np.diff(edges_ms) / 1e3
    assert moved.sum() == pytest.approx(8 * MIB)
    # From 120 to 130 ms: five of the 25 ms of 2 MiB. From 130 to 140: ten of them.
    assert moved[11:13].tolist() == pytest.approx([0.4 * MIB, 0.8 * MIB])
    mean = traces("throughput")["mean while busy"]
    assert mean["y"] == pytest.approx([8 / 0.108] * 2)  # 60 + 25 + 15 + 8 ms


def test_a_drivers_readings_stand_beside_throughput() -> None:
    readings = [{"time_ms": 100.0, "received_bytes_per_s": 512.0 * MIB}]
    found = traces("throughput", changed(link="PCIe", card=readings))
    read = found["PCIe as the driver counts it"]
    assert (read["x"], read["y"]) == ([0.1], [512.0])
    assert "PCIe as the driver counts it" not in traces("throughput")


def test_bytes_by_cause() -> None:
    found = traces("bytes")
    assert {name: (each["x"], each["y"]) for name, each in found.items()} == {
        "prefetched": ([1, 2], [2.0, 0.0]),
        "on demand": ([1, 2], [1.0, 1.0]),
        "of both, for rejected tokens only": ([1, 2], [1.0, 0.0]),
    }
    assert panel("bytes").table.rows[0] == [1, 2 * MIB, MIB, MIB, 3 * MIB + 4096, 2]


def test_the_roofline_by_hand() -> None:
    assert bandwidth_of(RUN) == pytest.approx(4 / 0.048)
    found = panel("roofline")
    rows = {(row[0], row[1]): row[2:] for row in found.table.rows}
    # k=2: two tokens of 3 MiB in 100 ms, 85 of them computing.
    assert rows["measured", 2] == pytest.approx([1, 2 / 3, 20.0, 2 / 0.085, 2 / 3 * 4 / 0.048])
    assert rows["measured", 0] == pytest.approx([1, 1.0, 20.0, 1 / 0.042, 4 / 0.048])
    # What moves nothing has no place on the picture.
    assert rows["expected", 2] == pytest.approx([None, 0.5, 20.0, 25.0, 0.5 * 4 / 0.048])
    assert len(rows) == 3
    named = traces("roofline")
    link = next(each for name, each in named.items() if name.startswith("roof of the link"))
    assert [y / x for x, y in zip(link["x"], link["y"], strict=True)] == pytest.approx(
        [4 / 0.048] * 2
    )
    assert named["measured, k=2 (1 steps)"]["x"] == pytest.approx([2 / 3])
    assert named["expected by the governor"]["y"] == pytest.approx([20.0])
    assert named["roof of computing, k=0"]["y"] == pytest.approx([1 / 0.042] * 2)


def test_draft_lengths_and_positions() -> None:
    found = traces("draft-lengths")
    assert (found["accepted"]["y"], found["rejected"]["y"]) == ([1, 0], [1, 0])
    assert (found["a probe"]["x"], found["a probe"]["y"]) == ([2], [0])
    # Position 2 was tried, as position 1 stood; both steps' pending tokens stand.
    assert panel("positions").table.rows == [
        [0, None, None, None, 4, 3, 0.75],
        [1, 1, 1, 1.0, 4, 2, 0.5],
        [2, 1, 0, 0.0, None, None, None],
    ]
    lines = traces("positions")
    accepted = lines["token accepted, if all before it were"]
    assert (accepted["x"], accepted["y"]) == ([1, 2], [1.0, 0.0])
    recall = lines["experts named by the draft's route"]
    assert (recall["x"], recall["y"]) == ([0, 1], [0.75, 0.5])


def test_a_token_behind_a_rejected_one_was_not_tried() -> None:
    step = replace(DRAFTED, positions=[(True, 1, 1), (False, 0, 0), (False, 0, 0)])
    rows = panel("positions", changed(steps=[step])).table.rows
    assert [row[:3] for row in rows] == [[0, None, None], [1, 1, 0]]


def test_layers_by_hand() -> None:
    (cells,) = panel("layers").data
    # Of 6 requests each: hits, late, missing, used, wasted. The prompt does not count.
    assert cells["z"][0] == pytest.approx([5 / 6, 1 / 6, 0, 2 / 6, 0], abs=1e-5)
    assert cells["z"][1] == pytest.approx([3 / 6, 1 / 6, 2 / 6, 1 / 6, 1 / 6], abs=1e-5)
    assert panel("layers").table.rows == [[0, 6, 5, 1, 2, 0, 5.0], [1, 6, 3, 1, 1, 1, 18.0]]
    (missed,) = panel("misses").data
    assert (missed["x"], missed["z"]) == ([1, 2], [[1, 0], [2, 1]])
    assert panel("misses").table.rows == [[1, 1, 2], [2, 0, 1]]


def test_residency_goes_to_the_page_as_it_is() -> None:
    frames = panel("residency").frames
    assert frames is not None
    assert frames.labels == ["step 0, the prompt", "step 1", "step 2"]
    assert (frames.layers, frames.experts) == (2, 5)
    assert (frames.slots, frames.used) == (RUN.residency.slots, RUN.residency.used)


def test_memory_adds_up_to_the_budget() -> None:
    data = panel("memory").data
    assert sum(each["x"][0] for each in data) == 40
    assert [each["name"] for each in data] == [
        *("non expert weights", "draft", "kv cache", "workspace", "slots", "unused")
    ]
    beside = changed(memory=RUN.memory | {"host_records": 7 * MIB})
    assert panel("memory", beside).data == data
    assert panel("memory", beside).table.rows[-1] == ["host records, outside it", 7 * MIB, None]


def test_expectations_beside_what_happened() -> None:
    rows = {row[0]: row[1:] for row in panel("plan").table.rows}
    assert rows["ms per token"] == [40.0, 50.0, 1.25]
    assert rows["MiB moved per token"] == pytest.approx([2.0, 4 / 3, 2 / 3])
    assert rows["tokens of a step"] == [2.0, 1.5, 0.75]
    (found,) = panel("plan").data
    assert found["y"] == pytest.approx([1.25, 2 / 3, 0.75, 0.5])
    steps = traces("forecasts")["a step"]
    assert (steps["x"], steps["y"]) == ([90.0, 55.0], [100.0, 50.0])


def test_a_stopped_draft_is_not_compared_with_its_forecast() -> None:
    stopped = replace(DRAFTED, figures=DRAFTED.figures | {"draft_length": 1})
    assert panel("forecasts", changed(steps=[stopped])).absent


def test_facts_and_notes() -> None:
    facts = dict(facts_of(RUN))
    assert facts["memory budget"] == "40 MiB"
    assert facts["time per output token (TPOT)"] == "50.0 ms"
    assert facts["speq"] == "0.1.0"
    assert len(page_of(RUN).notes) == 1
    late = page_of(changed(left_out=9)).notes[1]
    assert re.search(r"last 3 steps and leave out the 9", late)


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        # 23 of 150 ms; 127 ms would make 23.6 tokens per second.
        ({}, "15% of that time was spent waiting for experts from the disk; without that it would"),
        ({"stall_s": 0.075}, "50% of that time.* it would have been 40.$"),
        ({"stall_s": 0.0}, "20 tokens per second after the first. Nearly none"),
        ({"stall_s": 0.15}, "Nearly all of that time was spent waiting"),
        ({"tpot_ms": None, "new_tokens": 1}, "^$"),
    ],
)
def test_the_first_sentence_says_how_fast_it_was(stats: dict[str, Any], words: str) -> None:
    assert re.search(words, page_of(changed(stats=RUN.stats | stats)).summary)


def test_the_first_sentence_counts_the_time_without_waiting() -> None:
    assert page_of(RUN).summary.endswith("it would have been 23.6.")


@pytest.mark.parametrize(
    ("below", "above", "texts"),
    [
        (40.0, 100.0, ["40", "20", "0", "20", "40", "60", "80", "100"]),
        (0.0, 7.3, ["0", "2", "4", "6"]),
        (0.0, 0.34, ["0", "0.1", "0.2", "0.3"]),
        (2500.0, 900.0, ["2500", "2000", "1500", "1000", "500", "0", "500"]),
    ],
)
def test_ticks_that_grow_both_ways(below: float, above: float, texts: list[str]) -> None:
    places, found = mirrored_ticks(below, above)
    assert found == texts
    zero = texts.index("0")
    assert places == [(-1 if at < zero else 1) * float(text) for at, text in enumerate(texts)]


def test_a_page_of_a_large_model_is_small_enough() -> None:
    layers, experts, steps = 48, 128, 256
    random = np.random.default_rng(0)
    flags = [
        base64.b64encode(random.bytes(layers * experts // 8)).decode() for _ in range(2 * steps)
    ]
    times = random.uniform(0, 1, (steps, layers, 2)).cumsum(axis=1).round(3)
    run = changed(
        layers=layers,
        experts=experts,
        steps=[
            replace(
                DRAFTED,
                number=at,
                start_ms=120.0 + 100 * at,
                end_ms=220.0 + 100 * at,
                reason="18.4 ms a token expected (k=2 19.1, k=4 18.9), most of it verification",
                transfers=[[*(120.0 + 100 * at + each), 12_345_678] for each in times[at]],
                stalls=[[*(130.0 + 100 * at + each)] for each in times[at]],
                layers=random.integers(0, 40, (layers, 6)).tolist(),
            )
            for at in range(steps)
        ],
        residency=replace(
            RUN.residency, steps=list(range(steps)), slots=flags[:steps], used=flags[steps:]
        ),
    )
    assert len(render(page_of(run)).encode()) < 5_000_000
