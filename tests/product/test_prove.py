"""`speq prove`: every setting gives the tokens of plain decoding, and one that does not is told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import SpeqError
from speq.measure import prove
from speq.measure.settings import ProveSettings
from tests.helpers.cells import Folder
from tests.helpers.packed_files import Nvfp4Kind, write_packed
from tests.helpers.tiny_models import write_model

SETTINGS = ProveSettings(memory_budget="8MiB", num_prompts=2, max_new_tokens=8)
EACH = 2 * 2 * 8


@pytest.mark.wide
def test_settings_and_transformers_agree(command: Any, tiny: Folder, tmp_path: Path) -> None:
    target, page = tmp_path / "proof.json", tmp_path / "proof.md"
    ended = command(
        *("prove", tiny("qwen3_moe"), "--memory-budget", "8MiB", "--num-prompts", 2),
        *("--max-new-tokens", 8, "--json", target, "--page", page),
    )
    assert ended.code == 0, ended.err
    found = json.loads(target.read_text())
    names = [row["setting"] for row in found["rows"]]
    assert names[:3] == ["plain", "least budget", "ngram, k = 4"] and len(names) >= 7
    assert all((row["tokens"], row["same"]) == (EACH, EACH) for row in found["rows"])
    by_name = {row["setting"]: row for row in found["rows"]}
    assert by_name["least budget"]["moved_bytes_per_token"] > 0
    assert by_name["INT4 draft, k = 3"]["acceptance_rate"] > 0
    assert all(row["agreement"] == 1 for row in found["agreement"]["rows"])
    sentence = f"{EACH * (len(names) - 1)} of {EACH * (len(names) - 1)} tokens"
    assert f"passed: {sentence}" in ended.out and found["sentence"].startswith(sentence)
    written = page.read_text()
    assert written.startswith("# qwen3_moe: exact\n")
    assert f"Weights: {found['weights']}." in written
    assert f"| least budget | {EACH} | {EACH} | - |" in written


def changed(
    outcome: Callable[..., prove.SettingOutcome], name: str
) -> Callable[..., prove.SettingOutcome]:
    """As the function, but for one token of a setting."""

    def run(model: str, setting: prove.Setting, *others: Any) -> prove.SettingOutcome:
        made = outcome(model, setting, *others)
        if setting.name == name:
            made.texts[2][5] += 1
        return made

    return run


@pytest.mark.wide
def test_another_token_is_told(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "outcome_of", changed(prove.outcome_of, "as a batch"))
    proof = prove.prove(str(tiny("qwen3_moe")), SETTINGS)
    assert not proof.passed
    (row,) = (row for row in proof.report.rows if row["same"] != row["tokens"])
    assert (row["setting"], row["same"]) == ("as a batch", EACH - 3)
    assert row["first_difference"] == "text 3, token 6"
    assert prove.page_of(proof).startswith("# qwen3_moe: NOT exact\n")


def test_time_that_is_up(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a minute for each setting."""
    times, outcome = [0.0], prove.outcome_of

    def slow(*arguments: Any) -> prove.SettingOutcome:
        times.append(times[-1] + 60)
        return outcome(*arguments)

    monkeypatch.setattr(prove, "outcome_of", slow)
    settings = replace(SETTINGS, minutes=2.5)
    proof = prove.prove(str(tiny("qwen3_moe")), settings, clock=lambda: times[-1])
    names = [row["setting"] for row in proof.report.rows]
    assert names == ["plain", "least budget", "ngram, k = 4"]
    assert proof.passed and len(proof.notes) >= 4
    assert proof.notes[0] == "INT4 draft, k = 3: not compared, 2.5 minutes were over"


@pytest.mark.wide
def test_settings_that_say_nothing(tmp_path: Path) -> None:
    """Experts in four bits have no INT4 copy beside them, and one codec."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    source = write_model(tmp_path / "16", "qwen3_moe", torch.bfloat16, **sizes)
    kind = Nvfp4Kind("modelopt", "nvfp4")
    model = write_packed(tmp_path / "model", tmp_path / "words", source, kind)
    proof = prove.prove(str(model), SETTINGS)
    assert proof.passed and proof.agreement is not None
    assert "INT4 draft, k = 3: nothing was drafted" in proof.notes
    assert any("drafts from slots" in row["setting"] for row in proof.report.rows)
    assert not any(row["setting"].startswith("codec") for row in proof.report.rows)


def test_settings_that_cannot_run(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = prove.outcome_of

    def refusing(model: str, setting: prove.Setting, *others: Any) -> prove.SettingOutcome:
        if setting.name == "as a batch":
            raise SpeqError("no room for two")
        return outcome(model, setting, *others)

    monkeypatch.setattr(prove, "outcome_of", refusing)
    proof = prove.prove(str(tiny("qwen3_moe")), SETTINGS)
    assert proof.passed and "as a batch: cannot run (no room for two)" in proof.notes
