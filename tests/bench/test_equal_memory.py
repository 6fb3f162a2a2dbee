"""Systems at equal memory: slots and figures by hand, replays beside a count of their own."""

from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction

import pytest

from speq import SpeqError
from speq.bench.paper.candidates import (
    Candidate,
    CodecCost,
    ExpertMemory,
    Outcome,
    Standing,
    candidates_of,
    choose,
)
from speq.bench.paper.equal_memory_table import AIM_COLUMNS, COLUMNS, Row, aims_of, rows_of
from speq.bench.paper.recording import COUNTED, TRIAL, Recording, first_step, outcome_of
from speq.bench.replay.replay import Times
from speq.dashboard.bench_panels import equal_memory
from speq.measure.route_trace import RouteTrace, TraceStep
from speq.stats import RunStats, StepStats
from tests.helpers.paths import ROUTES

LRU_RAW, LRU_LOSSLESS = Candidate("raw", 0, "lru", "none"), Candidate("lossless", 0, "lru", "none")
DRAFT_RAW = Candidate("raw", 8, "lookahead", "three-phase")
DRAFT_RESIDUAL = Candidate("residual", 8, "lookahead", "three-phase")
LOSSLESS_AHEAD = Candidate("lossless", 0, "lookahead", "three-phase")

# An expert of 1,000 weights, in whole blocks of 64 bytes.
COSTS = {
    "raw": CodecCost("raw", 1000, slot_bytes=2048, moved_bytes=2000),
    "lossless": CodecCost("lossless", 1000, slot_bytes=1472, moved_bytes=1400, compute=1.1),
    "residual": CodecCost("residual", 1000, slot_bytes=1152, moved_bytes=1100, compute=0.9),
}


# Arithmetic.


@pytest.mark.parametrize(
    ("fraction", "slot_bytes", "has_draft", "expected"),
    [
        # Half of 256 experts of 2,000 bytes: 256,000, of which a draft takes 136,000.
        (0.5, 2048, False, 125),
        (0.5, 1472, False, 173),
        (0.5, 2048, True, 58),
        (0.5, 1152, True, 104),
        # Never more than there are.
        (0.75, 1472, False, 256),
        (2.0, 1152, True, 256),
        # 138,240 bytes leave 2,240 beside the draft: one slot, and the fewest are two.
        (0.27, 2048, True, 0),
        (0.272, 1152, True, 2),
        (0.2, 1152, True, 0),
        (0.2, 1152, False, 88),
    ],
)
def test_slots_by_hand(fraction: float, slot_bytes: int, has_draft: bool, expected: int) -> None:
    memory = ExpertMemory(num_experts=256, expert_bytes=2000, draft_bytes=136_000)
    assert memory.slots(fraction, slot_bytes, has_draft) == expected


def test_a_model_of_one_expert_needs_one_slot() -> None:
    assert ExpertMemory(1, 2000, 0).slots(1.1, 2048, False) == 1


def test_times_with_a_codec_by_hand() -> None:
    raw = Times(1.0, 2.0, expert_s=10.0, transfer_s=40.0, begun=2, moved_bytes=2000)
    found = COSTS["lossless"].times(raw)
    assert found.expert_s == pytest.approx(11.0)
    assert found.transfer_s == pytest.approx(28.0)
    assert (found.moved_bytes, found.begun) == (1400, 2)
    assert (found.draft_layer_s, found.layer_s) == (1.0, 2.0)
    assert COSTS["residual"].row()["bits_per_weight"] == pytest.approx(8.8)


def test_who_competes() -> None:
    systems = candidates_of([8])
    assert list(systems) == ["LRU raw", "LRU lossless", "draft + raw", "draft + residual", "auto"]
    assert systems["LRU raw"] == [LRU_RAW]
    assert systems["draft + raw"] == [DRAFT_RAW]
    assert systems["auto"] == [LRU_RAW, LRU_LOSSLESS, DRAFT_RAW, DRAFT_RESIDUAL, LOSSLESS_AHEAD]
    assert [c.draft_length for c in candidates_of([2, 4])["draft + residual"]] == [2, 4]
    # Residuals are read over the draft's codes, drafting or not.
    assert [c.has_draft for c in systems["auto"]] == [False, False, True, True, False]
    assert replace(DRAFT_RESIDUAL, draft_length=0).has_draft


def test_the_least_time_is_chosen() -> None:
    assert choose({LRU_RAW: 3.0, DRAFT_RAW: 2.0, LRU_LOSSLESS: 2.0}) == DRAFT_RAW


def run_of(*steps: StepStats) -> RunStats:
    prompt = StepStats("prefill", emitted=1, moved_bytes=10**6, stall_s=9.0, end_s=9.0)
    return RunStats(0.0, {}, steps=[prompt, *steps])


def test_an_outcome_by_hand() -> None:
    """Two texts of 12 and 4 decoded tokens: 1,200 and 80 ms."""
    long, short = StepStats("decode", emitted=9), StepStats("decode", emitted=4)
    long.moved_bytes, long.rejected_bytes, long.stall_s, long.link_s = 1500, 100, 0.4, 0.5
    long.draft_length, long.accepted, long.end_s = 16, 8, 1.0
    short.moved_bytes, short.rejected_bytes, short.link_s = 100, 60, 0.3
    short.draft_length, short.accepted, short.end_s = 4, 4, 0.08
    plain = StepStats("decode", emitted=3, start_s=2.0, end_s=2.2)
    found = Outcome.of(7, [run_of(long, plain), run_of(short)])
    assert found.slots == 7
    assert found.tpot_ms == pytest.approx(1280 / 16)
    assert (found.moved_bytes, found.rejected_bytes) == (100, 10)
    assert found.compute_ms == pytest.approx(880 / 16)
    assert found.link_ms == pytest.approx(800 / 16)
    assert found.acceptance_rate == pytest.approx((8 + 4) / (16 + 4))
    assert Outcome.of(1, [run_of(plain)]).acceptance_rate is None


def outcome(tpot_ms: float, moved_bytes: float = 0.0, **figures: float) -> Outcome:
    given = {"rejected_bytes": 0.0, "compute_ms": 50.0, "link_ms": 10.0}
    return Outcome(5, tpot_ms, moved_bytes, acceptance_rate=None, **(given | figures))


def test_a_spread_by_hand() -> None:
    rounds = Standing(LRU_RAW, [outcome(90), outcome(100), outcome(115)])
    assert rounds.tpot_spread == pytest.approx(0.25)
    assert rounds.median("tpot_ms") == 100
    assert Standing(LRU_RAW, [outcome(90)]).tpot_spread == 0


STANDINGS = {
    "LRU raw": Standing(LRU_RAW, [outcome(100, 1000.0, link_ms=60.0)]),
    "LRU lossless": Standing(),
    "draft + raw": Standing(DRAFT_RAW, [outcome(120, 2000.0)]),
    "draft + residual": Standing(
        DRAFT_RESIDUAL, [outcome(59, 1490.0), outcome(60, 1500.0), outcome(62, 1510.0)]
    ),
    "auto": Standing(LOSSLESS_AHEAD, [outcome(66, 400.0)]),
}


def test_rows_by_hand() -> None:
    rows = rows_of("engine", 0.5, STANDINGS)
    assert [row["system"] for row in rows] == list(STANDINGS)
    assert all(set(row) == set(rows[0]) for row in rows)
    assert {name for name, _ in COLUMNS.values()} <= set(rows[0])
    wanted = {"part": "engine", "f": 0.5, "system": "draft + residual", "codec": "residual"}
    wanted |= {"draft_length": 8, "cache_policy": "lookahead", "prefetch": "three-phase"}
    wanted |= {"slots": 5, "samples": 3, "acceptance_rate": None, "compute_ms": 50.0}
    wanted |= {"moved_bytes_per_token": 1500.0, "ratio_to_lru_raw": 1.5, "tpot_ms": 60.0}
    wanted |= {"rejected_bytes_per_token": 0.0, "link_ms": 10.0, "tpot_spread": 3 / 60}
    assert rows[3] == pytest.approx(wanted)
    # One for which there is no room.
    assert (rows[1]["slots"], rows[1]["samples"]) == (0, 0)
    assert rows[1]["tpot_ms"] is rows[1]["ratio_to_lru_raw"] is rows[1]["codec"] is None


def test_aims_by_hand() -> None:
    aims = aims_of(rows_of("engine", 0.5, STANDINGS))
    assert all({name for name, _ in AIM_COLUMNS.values()} == set(aim) for aim in aims)
    assert [(aim["found"], aim["met"]) for aim in aims] == [
        (pytest.approx(1500 / 2000), False),
        (pytest.approx(66 / 60), False),
        (pytest.approx(0.4), True),
    ]
    assert [aim["limit"] for aim in aims] == pytest.approx([0.7, 1.03 + 3 / 60, 0.6])
    assert "draft + residual" in aims[1]["aim"]


def test_aims_met_and_aims_that_are_none() -> None:
    lru = Standing(LRU_RAW, [outcome(100, 1000.0, link_ms=50.0)])
    standings = STANDINGS | {
        "LRU raw": lru,  # whose link takes no longer than its compute
        "draft + residual": Standing(DRAFT_RESIDUAL, [outcome(65, 1400.0)]),
    }
    aims = aims_of(rows_of("replay", 0.4, standings))
    assert [(aim["found"], aim["met"]) for aim in aims] == [
        (pytest.approx(0.7), True),
        (pytest.approx(66 / 65), True),
    ]
    nothing = dict.fromkeys(STANDINGS, Standing())
    assert aims_of(rows_of("replay", 0.1, nothing)) == []
    # Where the raw experts of a draft all fit, there are no bytes to compare.
    resident = {"draft + raw": Standing(DRAFT_RAW, [outcome(50)])}
    left = aims_of(rows_of("replay", 2.0, standings | resident))
    assert [aim["aim"].partition(",")[0] for aim in left] == ["auto"]


# Replays.


@pytest.fixture(scope="module")
def recording() -> Recording:
    trace = RouteTrace.read(ROUTES)
    trace = replace(trace, steps=trace.steps[:12])
    # The link takes twice as long for a raw expert as a layer takes to compute.
    times = Times(1e-3, 2e-3, 2e-4, transfer_s=4e-3, begun=2, moved_bytes=2000)
    return Recording({0: trace.plain(), 8: trace}, {0: times, 8: times}, draft_bytes=136_000)


def loads_of_lru(steps: list[TraceStep], slots: int, layers: int, counted_from: int) -> int:
    """Loads of tokens one by one, an equal share of slots for each layer: a count of its own."""
    share, rest = divmod(slots, layers)
    residents: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(layers)]
    loads = 0
    for number, step in enumerate(steps):
        for layer, (wanted,) in enumerate(step.used):
            order = residents[layer]
            missing = [expert for expert in sorted(wanted) if expert not in order]
            for expert in sorted(set(wanted) - set(missing)):
                order.move_to_end(expert)
            for expert in missing:
                if len(order) == share + (layer < rest):
                    del order[next(e for e in order if e not in wanted)]
                order[expert] = None
            loads += len(missing) * (number >= counted_from)
    return loads


@pytest.mark.parametrize("fraction", [0.35, 0.5, 0.75])
def test_bytes_of_lru_beside_a_count_of_its_own(fraction: float, recording: Recording) -> None:
    standings = recording.compete(candidates_of([8]), COSTS, fraction)
    steps = recording.traces[0].steps
    counted = len(steps) - -(-len(steps) // 4)  # tokens one by one: all but a quarter of the steps
    for name, held in (("LRU raw", "raw"), ("LRU lossless", "lossless")):
        size = COSTS[held]
        slots = min(int(fraction * 256 * 2000) // size.slot_bytes, 256)
        (found,) = standings[name].outcomes
        assert found.slots == slots
        loads = loads_of_lru(steps, slots, 8, len(steps) - counted)
        assert found.moved_bytes == pytest.approx(loads * size.moved_bytes / counted)
        # What is there already is computed while the rest is fetched.
        assert found.compute_ms < found.tpot_ms <= found.compute_ms + found.link_ms + 1e-9
        assert found.link_ms == pytest.approx(loads * size.moved_bytes * 2e-6 / counted * 1e3)
        assert found.compute_ms == pytest.approx(8 * (2 + 4 * 0.2 * size.compute))


def test_every_system_by_its_best_candidate(recording: Recording) -> None:
    """Another draft length, at which nothing is gained: every token of every draft is wrong."""
    trace = recording.traces[8]
    cut = [replace(step, path=step.path[:1]) for step in trace.steps]
    worse = replace(
        recording,
        traces=recording.traces | {4: replace(trace, steps=cut, draft_length=4)},
        times=recording.times | {4: recording.times[8]},
    )
    standings = worse.compete(candidates_of([4, 8]), COSTS, 0.5)
    assert standings["draft + raw"].candidate == DRAFT_RAW
    assert standings["draft + residual"].candidate == DRAFT_RESIDUAL
    assert standings["draft + residual"].outcomes[0].slots == 104
    fastest = min(standing.median("tpot_ms") for standing in standings.values())
    assert standings["auto"].median("tpot_ms") >= fastest
    # Fewer slots of it, and each of them fewer bytes.
    raw, residual = (standings[name].outcomes[0] for name in ("draft + raw", "draft + residual"))
    assert residual.moved_bytes < raw.moved_bytes * 1100 / 2000
    assert residual.acceptance_rate == raw.acceptance_rate


def test_who_has_no_room_does_not_compete(recording: Recording) -> None:
    standings = recording.compete(candidates_of([8]), COSTS, 0.26)
    assert standings["draft + raw"] == standings["draft + residual"] == Standing()
    chosen = standings["auto"].candidate
    assert chosen is not None and not chosen.has_draft
    alone = recording.compete({"draft + raw": [DRAFT_RAW]}, COSTS, 0.1)
    assert alone == {"draft + raw": Standing()}


def test_auto_looks_at_the_trial_alone(recording: Recording) -> None:
    """Whatever the counted part is like: of other experts, one and the same for all tokens."""
    systems = candidates_of([8])
    before = recording.compete(systems, COSTS, 0.4)["auto"]
    changed = {}
    for length, trace in recording.traces.items():
        at = first_step_of(trace.steps, COUNTED)
        rest = [
            replace(
                step,
                used=[[[0, 1, 2, 3] for _ in nodes] for nodes in step.used],
                drafted=[[([0, 1, 2, 3], [0.25] * 4) for _ in token] for token in step.drafted],
            )
            for step in trace.steps[at:]
        ]
        changed[length] = replace(trace, steps=trace.steps[:at] + rest)
    after = replace(recording, traces=changed).compete(systems, COSTS, 0.4)["auto"]
    assert after.candidate == before.candidate
    assert after.median("moved_bytes") < before.median("moved_bytes") / 2


def first_step_of(steps: list[TraceStep], share: Fraction) -> int:
    return first_step([StepStats("decode", emitted=step.emitted) for step in steps], share)


def test_windows_by_hand() -> None:
    """Of 16 tokens, the trial has those after the second and before the fifth at the least."""
    steps = [
        StepStats("decode", emitted=n, end_s=float(n), moved_bytes=10 * n) for n in (1, 3, 4, 8)
    ]
    assert [first_step(steps, share) for share in (Fraction(0), TRIAL, COUNTED, Fraction(1))] == [
        0, 2, 2, 4,
    ]  # fmt: skip
    found = outcome_of(3, steps, COUNTED)
    assert (found.slots, found.moved_bytes, found.tpot_ms) == (3, 10, 1000)
    with pytest.raises(SpeqError, match="the texts have 16 tokens, too few to try candidates"):
        outcome_of(3, steps, TRIAL, COUNTED)


def test_what_a_recording_rests_on(recording: Recording) -> None:
    assert recording.memory == ExpertMemory(256, 2000, 136_000)
    found, tokens = recording.as_json(), sum(len(s.path) for s in recording.traces[8].steps)
    assert found["tokens"] == {"0": tokens, "8": tokens}
    assert found["times"]["8"]["transfer_s"] == 4e-3
    assert found["draft_bytes"] == 136_000


# The picture.


def test_the_picture_shows_the_rows() -> None:
    rows: list[Row] = []
    for part, fraction in (("replay", 0.4), ("replay", 0.5), ("engine", 0.5)):
        rows += rows_of(part, fraction, STANDINGS)
    report = {"bench": "equal-memory", "settings": {}, "rows": rows}
    moved, times, codecs, aims = equal_memory.panels(report)
    bytes_of = {line["name"]: line for line in moved.data}
    times_of = {line["name"]: line for line in times.data}
    assert set(bytes_of) == set(times_of)
    # Lossless slots had no room.
    assert len(bytes_of) == 2 * (len(STANDINGS) - 1)
    line, point = bytes_of["draft + raw, replay"], times_of["draft + raw, engine"]
    assert (line["x"], line["y"], line["mode"]) == ([40, 50], [2.0, 2.0], "lines+markers")
    assert (point["x"], point["y"]) == ([50], [120])
    assert "LRU lossless, replay" not in times_of
    assert codecs.absent and aims.absent
