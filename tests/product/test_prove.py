"""`speq prove`: every setting gives the tokens of plain decoding, and one that does not is told."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from speq import SpeqError, pack
from speq.config import RunConfig
from speq.files.checkpoint import Checkpoint
from speq.generator import Generator
from speq.measure import plain_model, prove
from speq.measure.settings import ProveSettings
from tests.helpers.cells import Folder
from tests.helpers.command import Command
from tests.helpers.damage import flip_byte
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


def compared(model: Path, *more: object) -> list[object]:
    """Only with transformers."""
    options = ["--memory-budget", "2MiB", "--minutes", 0, "--num-prompts", 1]
    return ["prove", model, *options, *more]


@pytest.fixture
def long_prompt(tmp_path: Path) -> Path:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "".join(chr(32 + i * i % 90) for i in range(300))}))
    return path


def test_transformers_agree_on_a_sound_model(
    command: Command, tiny: Folder, tmp_path: Path, long_prompt: Path
) -> None:
    target, page = tmp_path / "proof.json", tmp_path / "proof.md"
    ended = command(
        *compared(tiny("qwen2_moe"), "--prompts", long_prompt, "--json", target, "--page", page)
    )
    assert ended.code == 0, ended.err
    assert "passed: the exact path and transformers choose the same token at 100.00%" in ended.out
    found = json.loads(target.read_text())
    assert found["rows"] == []
    (row,) = found["agreement"]["rows"]
    assert (row["tokens"], row["agreement"]) == (256, 1)
    assert 0 <= row["max_logit_difference"] < 1e-3 * row["max_logit"]
    assert "| 256 | 100.00% | " in page.read_text()


def test_transformers_disagree(
    command: Command, tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with plain transformers on another checkpoint of the same shape."""
    other = write_model(tmp_path / "other", "qwen2_moe", seed=1)

    def elsewhere(checkpoint: Checkpoint, wanted: Callable[[str], bool], **options: Any) -> Any:
        assert checkpoint.path == tiny("qwen2_moe")
        return AutoModelForCausalLM.from_pretrained(other, **options)

    monkeypatch.setattr(plain_model, "load_dequantized", elsewhere)
    ended = command(*compared(tiny("qwen2_moe")))
    assert ended.code == 1
    assert "FAILED: the exact path and transformers choose the same token at " in ended.out
    assert "(100% required)" in ended.out


@pytest.mark.parametrize("family", ["qwen2_moe", "phimoe", "gemma4"])
def test_what_rounding_does(command: Command, tmp_path: Path, family: str) -> None:
    """In 16 bits near-ties turn, of tokens and of experts, in transformers as well."""
    model = write_model(tmp_path / family, family, torch.bfloat16, vocab_size=2000)
    ended = command(*compared(model, "--dtype", "bfloat16", "--memory-budget", "64MiB"))
    assert ended.code == 0, ended.out
    assert "so rounding explains what differs" in ended.out


def test_a_lost_expert_in_sixteen_bits(
    command: Command, tmp_path: Path, long_prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with plain transformers on the checkpoint before an expert was lost."""
    sound = write_model(tmp_path / "sound", "qwen3_moe", torch.bfloat16)
    damaged = tmp_path / "damaged"
    shutil.copytree(sound, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.experts.6.down_proj.weight"].zero_()  # which all tokens use
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(
        plain_model,
        "load_dequantized",
        lambda checkpoint, wanted, **options: AutoModelForCausalLM.from_pretrained(
            sound, **options
        ),
    )
    ended = command(*compared(damaged, "--prompts", long_prompt, "--dtype", "bfloat16"))
    assert ended.code == 1, ended.out
    assert "FAILED: " in ended.out and "rounding does not explain what differs" in ended.out


def test_a_model_with_a_short_context(command: Command, tmp_path: Path) -> None:
    model = write_model(tmp_path / "short", "qwen3_moe", max_position_embeddings=48)
    ended = command(*compared(model))
    assert ended.code == 0, ended.err
    assert "the same token at 100.00% of 48 positions" in ended.out


@pytest.mark.parametrize("minutes", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_pack_that_is_not_what_was_packed(minutes: int, tiny: Folder, tmp_path: Path) -> None:
    """Settings may not read what is damaged, and then say nothing of it."""
    packed = tmp_path / "packed"
    pack(tiny("qwen3_moe"), packed)
    settings = replace(SETTINGS, minutes=minutes)
    proof = prove.prove(str(packed), settings)
    assert proof.passed and proof.agreement is not None
    assert proof.agreement.rows[0]["experts"] == 24
    flip_byte(packed / "experts.bin", 4096)
    with pytest.raises(SpeqError, match="is not what was packed"):
        prove.prove(str(packed), settings)


def test_options_of_a_run_are_those_of_all_settings(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunConfig] = []
    load = Generator.load

    def watched(model: str, config: RunConfig, **others: Any) -> Generator:
        seen.append(config)
        return load(model, config, **others)

    monkeypatch.setattr(Generator, "load", watched)
    settings = replace(SETTINGS, run={"reader_threads": 3}, num_prompts=1, max_new_tokens=2)
    proof = prove.prove(str(tiny("qwen3_moe")), settings)
    assert proof.passed and proof.report.settings["run"] == {"reader_threads": "3"}
    assert len(seen) > 8 and {config.reader_threads for config in seen} == {3}


def test_nothing_can_be_compared(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings no proof is left; with them it says what was not compared."""
    monkeypatch.setattr(plain_model, "available_bytes", lambda: 1)
    with pytest.raises(SpeqError, match="plain transformers needs"):
        prove.prove(str(tiny("qwen3_moe")), replace(SETTINGS, minutes=0))
