"""`speq demo`: the model that comes along, found and run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from speq.cli.demo import NEXT, PACKAGE, PROMPT, demo_model
from speq.config import SamplingParams
from tests.helpers.command import Command
from tests.helpers.paths import BUNDLED
from tests.helpers.tiny_models import drawn_tokens, load_plain


def test_the_demonstration(command: Command) -> None:
    """Its text begins as plain transformers' does; in 16 bits a near-tie turns sooner or later."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    options = SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.9, seed=1)
    prompt = tokenizer(PROMPT)["input_ids"]
    tokens = drawn_tokens(load_plain(BUNDLED, torch.bfloat16), prompt, 12, options)
    shown = command("demo")
    assert shown.code == 0
    assert PROMPT + tokenizer.decode(tokens) in shown.out
    for name, arguments in NEXT:
        assert f"  speq {name} models/tiny-moe {arguments}\n" in shown.out


def test_a_model_that_is_a_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_model() == folder


def test_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(
        demo_model.__globals__, "__file__", str(tmp_path / "speq" / "cli" / "demo.py")
    )
    shown = command("demo")
    assert shown.code == 1
    assert "the demonstration's model is not installed; install the package" in shown.err
