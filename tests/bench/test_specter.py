"""Specter's cells: slots as its protocol has them, and what may not be set beside it."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from speq.bench.runs import specter, tpot
from speq.bench.runs.specter import CHOSEN, DRAFT, SAME_CACHE, SAME_MEMORY, SpecterModel
from speq.bench.settings import TpotSettings
from speq.errors import SpeqError
from speq.models.opened import open_model

Folder = Callable[[str], Path]


@pytest.mark.wide
def test_cells_have_the_residents_of_the_protocol(
    tiny_bfloat16: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_bfloat16("qwen2_moe")
    with closing(open_model(folder)) as opened:
        store = opened.store
        slot_bytes, layers, experts = store.codec.slot_bytes, store.num_layers, store.num_experts
    small = SpecterModel(experts, 2, {"high": 3, "low": 2})
    monkeypatch.setitem(specter.MODELS, "qwen2_moe", small)
    settings = TpotSettings(
        protocol="specter",
        prompts=(Path("code"),),
        num_prompts=1,
        rounds=1,
        synthetic_acceptance=1,
        run={"profile": "none"},
    )
    report = tpot.run(str(folder), settings)
    assert [(row["tier"], row["system"]) for row in report.rows] == [
        (tier, system)
        for tier in ("high", "low")
        for system in (DRAFT, SAME_CACHE, SAME_MEMORY, CHOSEN)
    ]
    for row in report.rows:
        held = row["slots_bytes"] // slot_bytes
        wanted = layers * small.residents[row["tier"]]
        if row["system"] == SAME_CACHE:
            assert held == wanted
        elif row["system"] == DRAFT:  # whose passes have more rows
            assert held in (wanted, wanted - 1)
            assert row["acceptance_rate"] == 1
        elif row["system"] == SAME_MEMORY:
            assert held > wanted and row["acceptance_rate"] is None
        assert (row["tpot_ratio"] == 1) == (row["system"] == DRAFT)
    high = {row["system"]: row["published_ratio"] for row in report.rows if row["tier"] == "high"}
    assert high == {DRAFT: None, SAME_CACHE: 2.5, SAME_MEMORY: None, CHOSEN: None}
    tpot.show(report)
    assert "residents" in capsys.readouterr().out
    assert tpot.notes(report)[-1] == "WHAT-IF: acceptance set to 1"


def test_another_model_is_refused(tiny: Folder) -> None:
    with pytest.raises(SpeqError, match=r"and .* is a qwen3_moe of 8 experts a layer; give one of"):
        tpot.run(str(tiny("qwen3_moe")), TpotSettings(protocol="specter"))


@pytest.mark.parametrize("other", [{"budgets": ("1GiB",)}, {"max_new_tokens": 9}])
def test_what_the_protocol_sets_is_refused(tiny: Folder, other: dict[str, object]) -> None:
    settings = TpotSettings(protocol="specter", **other)  # type: ignore[arg-type]
    with pytest.raises(SpeqError, match="protocol specter sets budgets, draft lengths, lengths"):
        tpot.run(str(tiny("qwen2_moe")), settings)


def test_without_a_protocol_budgets_must_be_given(tiny: Folder) -> None:
    with pytest.raises(SpeqError, match="budgets must be given, such as 8GiB,12GiB; or a protoc"):
        tpot.run(str(tiny("qwen2_moe")), TpotSettings())
