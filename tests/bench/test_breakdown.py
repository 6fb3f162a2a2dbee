"""`speq bench breakdown`: shares that add up, the round that a row shows, and a real run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from speq.bench.paper import breakdown
from speq.bench.paper.breakdown import Sample, Settings, Shares, options_of, summarise
from speq.errors import SpeqError
from speq.stats import Recorder, RunStats
from tests.helpers.fake_transfer import Clock
from tests.helpers.packing import pack_to
from tests.helpers.told import Told

Folder = Callable[[str], Path]

SHARES = ("waiting", "drafting", "verifying", "rest")


def recorded(steps: list[tuple[float, float, float, float]], emitted: int) -> RunStats:
    """A run of steps that take (draft, verify before a stall, stall, rest) seconds each, with a
    transfer that begins with each draft and ends with the stall.
    """
    clock = Clock()
    recorder = Recorder(clock)
    run = recorder.begin_run(RunStats(0.0, {}))
    for draft_s, verify_s, stall_s, rest_s in steps:
        recorder.begin("decode")
        with recorder.timed("transfer", 0, 0, 600):
            with recorder.timed("draft"):
                clock.now += draft_s
            with recorder.timed("verify"):
                clock.now += verify_s
                with recorder.timed("stall", 0):
                    clock.now += stall_s
        clock.now += rest_s
        recorder.step.emitted = emitted
        recorder.finish()
    return run


def test_shares_of_a_recorded_run() -> None:
    """Two texts: their seconds are added up before anything is divided."""
    one, other = recorded([(1, 2, 4, 1), (0, 3, 0, 1)], 2), recorded([(3, 0, 4, 1)], 1)
    sample = Sample.of([one, other])
    whole_s = 8 + 4 + 8
    assert sample.shares == Shares(8 / whole_s, 4 / whole_s, 5 / whole_s, pytest.approx(3 / 20))
    assert sum(getattr(sample.shares, name) for name in SHARES) == pytest.approx(1)
    assert sample.tpot_ms == pytest.approx(whole_s / 5 * 1e3)
    assert sample.moved_bytes_per_token == 3 * 600 / 5
    assert sample.hidden_share == pytest.approx(1 - 8 / (7 + 3 + 7))


def test_rows_show_the_round_in_the_middle() -> None:
    times = {30.0: 0.5, 10.0: 0.1, 20.0: 0.7, 25.0: 0.2}
    samples = [
        Sample(tpot_ms, Shares(waiting, 0.1, 0.8 - waiting, 0.1), tpot_ms * 10, None)
        for tpot_ms, waiting in times.items()
    ]
    row = summarise("1MiB", "auto", samples)
    assert (row["tpot_ms"], row["spread"]) == (22.5, 20 / 22.5)
    assert row["waiting"] == 0.7  # of the faster of two
    assert sum(row[name] for name in SHARES) == pytest.approx(1)
    assert (row["moved_bytes_per_token"], row["hidden_share"]) == (225, None)
    assert (row["budget_bytes"], row["rounds"]) == (1 << 20, 4)
    assert summarise("1MiB", "auto", samples[:1])["waiting"] == 0.5


def test_only_auto_has_options_of_slots_and_drafts() -> None:
    settings = Settings(
        ("1MiB",), run={"dtype": "float32", "drafter": "ngram", "codec": "residual"}
    )
    assert options_of("auto", settings) == settings.run
    on_demand = options_of("on demand", settings)
    assert (on_demand["dtype"], on_demand["codec"]) == ("float32", "raw")
    assert "drafter" not in on_demand


@pytest.mark.wide
def test_a_run_of_the_bundled_model(bundled: Path) -> None:
    told = Told()
    settings = Settings(
        ("26MiB",),
        num_prompts=1,
        max_new_tokens=6,
        rounds=1,
        run={"drafter": "int4", "draft_length": "2", "profile": "none"},
    )
    report = breakdown.run(str(bundled), settings, None, False, told)
    assert told.steps("measuring systems") == 2
    rows = {row["system"]: row for row in report.rows}
    assert [*rows] == ["on demand", "auto"]
    for row in rows.values():
        assert sum(row[name] for name in SHARES) == pytest.approx(1)
        assert all(row[name] >= 0 for name in SHARES)
        assert row["tpot_ms"] > 0
        assert row["spread"] == 0
    assert rows["on demand"]["waiting"] > 0
    assert rows["on demand"]["moved_bytes_per_token"] > 0
    # Without a draft there is only the asking for one.
    assert rows["on demand"]["drafting"] < 0.1 < rows["auto"]["drafting"]


def test_a_pack_needs_the_published_model_beside_it(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    published = tiny_bfloat16("qwen3_moe")
    pack_to(published, tmp_path / "packed", codec="lossless").close()
    settings = Settings(("8MiB",), num_prompts=1, max_new_tokens=4, rounds=1)
    with pytest.raises(SpeqError, match="codec raw was asked for and the model is packed"):
        breakdown.run(str(tmp_path / "packed"), settings, None, False)
    beside = replace(settings, published=str(published))
    report = breakdown.run(str(tmp_path / "packed"), beside, None, False)
    assert [row["system"] for row in report.rows] == ["on demand", "auto"]
    for row in report.rows:
        assert sum(row[name] for name in SHARES) == pytest.approx(1)
        assert row["tpot_ms"] > 0


def test_nonsense_is_refused_before_anything_runs(bundled: Path) -> None:
    settings = Settings(("26MiB",), run={"cache_policy": "best"})
    with pytest.raises(SpeqError, match="cache_policy is 'best'"):
        breakdown.run(str(bundled), settings, None, False)
