"""`speq bench ablation`: what each row leaves out, and that no row changes a token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.bench.machine import step
from speq.bench.paper import ablation
from speq.bench.paper.ablation import (
    FULL,
    InOneWave,
    Part,
    Sample,
    Settings,
    first_difference,
    notes,
    offered,
    parts_of,
    row_by_row,
    summarise,
)
from speq.errors import SpeqError
from speq.kernels import ops
from speq.registries import PREFETCHERS
from speq.scheduler.eviction import LookaheadPolicy, LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import ThreePhase
from speq.stats import Recorder, RunStats, StepStats
from tests.helpers.fake_transfer import Clock, FakeTransfer
from tests.helpers.packing import pack_to
from tests.helpers.told import Told

Folder = Callable[[str], Path]

# Holds the draft of a small model, and some of its experts.
BUDGET = "1300KiB"
NAMES = [part.name for part in parts_of(Settings("1MiB"))]


def sample(tpot_ms: float, *texts: tuple[int, ...], accepted: float | None = None) -> Sample:
    return Sample(tpot_ms, 2.0, accepted, tpot_ms * 100, texts)


def test_figures_of_texts_are_added_up_first() -> None:
    one, other = RunStats(0.0, {}), RunStats(0.0, {})
    drafted = {"draft_length": 4, "accepted": 3, "emitted": 4, "moved_bytes": 50, "end_s": 0.3}
    one.record(StepStats("prefill", emitted=1, end_s=9.0))
    one.record(StepStats("decode", **drafted))  # type: ignore[arg-type]
    other.record(StepStats("decode", emitted=1, end_s=0.2))
    found = Sample.of([one, other], [[1, 2], [3]])
    assert found.tpot_ms == pytest.approx(100)
    assert (found.draft_length_mean, found.acceptance_rate) == (2, 0.75)
    assert (found.moved_bytes_per_token, found.tokens) == (10, ((1, 2), (3,)))


def test_rows_by_hand() -> None:
    full = [sample(10, (1, 2, 3), (4, 5)), sample(20, (1, 2, 3), (4, 5)), sample(40, (1, 2, 3))]
    without = [
        sample(20, (1, 2, 3), (4, 5), accepted=0.5),
        sample(25, (1, 2, 7), (4, 5), accepted=1.0),
        sample(50, (1, 9, 3), (4, 5)),
    ]
    row = summarise("governor", without, full, None)
    assert (row["without"], row["refused"]) == ("governor", None)
    assert (row["tokens_per_s"], row["tpot_ms"], row["spread"]) == (40, 25, 30 / 25)
    assert row["of_full"] == 0.8  # of 0.5, 0.8 and 0.8; medians alone would say 20 / 25
    assert (row["acceptance_rate"], row["moved_bytes_per_token"]) == (0.75, 2500)
    assert (row["texts"], row["differing"], row["first_difference"]) == (6, 2, 1)
    assert summarise(FULL, full[:2], full[:2], None)["without"] == "nothing"


def test_a_refused_row_has_its_reason_and_no_figure() -> None:
    row = summarise("governor", [], [sample(10, (1,))], "no room")
    known = {name: value for name, value in row.items() if value is not None}
    assert known == {"without": "governor", "refused": "no room"}
    assert row.keys() == summarise(FULL, [sample(1, (1,))], [sample(1, (1,))], None).keys()


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1)],
)
def test_first_difference(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_rows_of_a_verification_one_by_one() -> None:
    """The same outputs; rows whose expert is in no slot are left as they were."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 64, generator=generator)
    gate_up = torch.randn(3, 64, 64, generator=generator)
    down = torch.randn(3, 64, 32, generator=generator)
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 1]])
    table = torch.tensor([2, 0, 1, -1])
    whole, rows = torch.full((5, 2, 64), 7.0), torch.full((5, 2, 64), 7.0)
    calls: list[int] = []

    def counted(hidden_states: Tensor, *more: Any) -> None:
        calls.append(len(hidden_states))
        ops.moe_grouped(hidden_states, *more)

    ops.moe_grouped(hidden, ids, table, gate_up, down, "silu", whole)
    row_by_row(counted)(hidden, ids, table, gate_up, down, "silu", rows)
    assert calls == [1] * 5
    torch.testing.assert_close(rows, whole)
    assert (rows[ids == 3] == 7).all()


def served(
    prefetcher: type[ThreePhase], policy: type[LruPolicy | LookaheadPolicy], slots: int
) -> list[set[int]]:
    """Waves of a layer that wants four experts, of which two are in slots."""
    transfer, cache = FakeTransfer(), ExpertCache(slots, policy(slots, 2, 8))
    loader = ExpertLoader(cache, transfer, Recorder(Clock()))
    made = prefetcher(loader, LookaheadBuffer(2))
    loader.load_ahead([ExpertKey(0, 1), ExpertKey(0, 3)], 2)
    transfer.end_all()
    loader.collect_finished()
    waves = [set(wave) for wave in made.serve(0, [1, 2, 3, 4])]
    assert not loader.under_way
    assert loader.cache.free_slots + len(loader.cache) == slots
    return waves


def test_what_is_in_slots_waits_for_what_is_not() -> None:
    assert served(ThreePhase, LookaheadPolicy, 6)[0] == {1, 3}
    assert served(InOneWave, LookaheadPolicy, 6) == [{1, 2, 3, 4}]
    # A layer's share of the slots is three: four are never there together.
    waves = served(InOneWave, LruPolicy, 6)
    assert len(waves) > 1
    assert sorted(expert for wave in waves for expert in wave) == [1, 2, 3, 4]


def test_the_prefetcher_is_no_choice_of_users() -> None:
    with offered():
        assert PREFETCHERS[ablation.IN_ONE_WAVE] is InOneWave
    assert ablation.IN_ONE_WAVE not in PREFETCHERS


def settings(**changes: Any) -> Settings:
    given = Settings(
        "64MiB",
        draft_length=3,
        fixed_length=2,
        num_prompts=1,
        max_new_tokens=8,
        rounds=1,
        run={"drafter": "int4", "profile": "none"},
    )
    return replace(given, **changes)


def only(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave out all rows but the whole and these."""

    def chosen(settings: Settings) -> list[Part]:
        return [part for part in parts_of(settings) if part.name in (FULL, *names)]

    patch.setattr(ablation, "parts_of", chosen)


def test_what_benches_change_changes_no_token(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with fewer slots than experts."""
    calls = {"fused": 0, "unfused": 0, "row by row": 0, "in one wave": 0}
    unfused, serve = step.DRAFT_KERNELS["unfused"], InOneWave.serve

    def counted_kernel(*arguments: Any) -> Tensor:
        calls["unfused"] += 1
        return unfused(*arguments)

    def counted_rows(op: Callable[..., None]) -> Callable[..., None]:
        calls["row by row"] += 1
        return row_by_row(op)

    def counted_serve(self: InOneWave, layer: int, experts: list[int]) -> Any:
        calls["in one wave"] += 1
        return serve(self, layer, experts)

    monkeypatch.setitem(step.DRAFT_KERNELS, "unfused", counted_kernel)
    monkeypatch.setattr(ablation, "row_by_row", counted_rows)
    monkeypatch.setattr(InOneWave, "serve", counted_serve)
    names = "fused kernel", "slots first", "grouping by expert"
    only(monkeypatch, *names)
    told = Told()
    given = settings(memory_budget=BUDGET, max_new_tokens=16)
    report = ablation.run(str(tiny("qwen3_moe")), given, None, False, told)
    assert told.steps("measuring settings") == 4
    assert [row["without"] for row in report.rows] == ["nothing", *names]
    assert min(calls["unfused"], calls["row by row"], calls["in one wave"]) > 0
    for row in report.rows:
        assert (row["refused"], row["texts"], row["differing"]) == (None, 1, 0)
        assert row["moved_bytes_per_token"] > 0
        assert row["draft_length_mean"] > 1
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["tpot_ms"])
    assert notes(report) == []


@pytest.mark.wide
def test_no_row_changes_a_token(bundled: Path) -> None:
    """In float32, with fewer slots than experts."""
    run = {"drafter": "int4", "profile": "none", "dtype": "float32"}
    report = ablation.run(str(bundled), settings(memory_budget="48MiB", run=run), None, False)
    assert [row["without"] for row in report.rows] == ["nothing", *NAMES[1:]]
    for row in report.rows:
        assert (row["refused"], row["texts"], row["differing"]) == (None, 1, 0)
    rows = {row["without"]: row for row in report.rows}
    assert rows["draft"]["draft_length_mean"] == 0
    assert rows["draft"]["acceptance_rate"] is None
    assert 0 < rows["governor"]["draft_length_mean"] <= 2 < rows["nothing"]["draft_length_mean"]


def test_what_cannot_be_left_out_says_why(
    tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tiny_bfloat16("qwen3_moe")
    pack_to(published, tmp_path / "packed", codec="lossless").close()
    given = settings(run={"profile": "none", "drafter": "none"}, draft_length=0, fixed_length=0)
    only(monkeypatch, "fused kernel", "compact slots")
    for beside, reasons in (
        (None, {"fused kernel": "no draft of", "compact slots": "codec raw"}),
        (published, {"fused kernel": "no draft of"}),
    ):
        chosen = replace(given, published=beside and str(beside))
        report = ablation.run(str(tmp_path / "packed"), chosen, None, False)
        refused = {row["without"]: row["refused"] for row in report.rows if row["refused"]}
        assert refused.keys() == reasons.keys()
        for name, reason in reasons.items():
            assert refused[name].startswith(reason)
        said = notes(report)
        assert len(said) == len(reasons) + 1
        assert said[-1].startswith("nothing was drafted here")


def test_a_whole_that_is_refused_ends_the_bench(bundled: Path) -> None:
    with pytest.raises(SpeqError, match="memory budget 1 KiB is too small"):
        ablation.run(str(bundled), settings(memory_budget="1KiB"), None, False)
    with pytest.raises(SpeqError, match="dtype is 'int4'"):
        ablation.run(str(bundled), settings(run={"dtype": "int4"}), None, False)
