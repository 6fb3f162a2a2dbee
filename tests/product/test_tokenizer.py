"""Token ids of texts: their ends, and tokens that a model lacks."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from speq.errors import SpeqError
from speq.text.prompts import PromptEncoder
from speq.text.tokenizer import load_tokenizer, tokens_of
from tests.helpers.tokenizer_kinds import tokenizer_of

# What tokenizer.json puts around a text, by the flags of the configuration that it was made for.
PUTS = {
    "nothing": "$A",
    "both": "<s> $A </s>",
    "first": "<s> $A",
    "others": "<|end|> $A",
}


def folder_of(folder: Path, kind: str, puts: str, **flags: Any) -> Path:
    tokenizer = tokenizer_of(kind)
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=PUTS[puts], special_tokens=special),
        ]
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("add_")}
    path.write_text(json.dumps(config | flags))
    return folder


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    ("puts", "flags", "wanted"),
    [
        ("nothing", {}, "dog"),
        ("nothing", {"add_bos_token": True}, "<s> dog"),
        ("nothing", {"add_bos_token": True, "add_eos_token": False}, "<s> dog"),
        ("nothing", {"add_bos_token": True, "add_eos_token": True}, "<s> dog </s>"),
        ("nothing", {"add_eos_token": True}, "dog </s>"),
        ("nothing", {"add_bos_token": None}, "dog"),
        ("both", {}, "<s> dog </s>"),
        ("both", {"add_bos_token": False}, "dog </s>"),
        ("both", {"add_eos_token": False}, "<s> dog"),
        ("both", {"add_bos_token": False, "add_eos_token": False}, "dog"),
        ("first", {"add_bos_token": True}, "<s> dog"),
        ("first", {"add_bos_token": False, "add_eos_token": True}, "dog </s>"),
        ("first", {"add_eos_token": True}, "<s> dog </s>"),
        ("others", {"add_bos_token": True}, "<s> <|end|> dog"),
        ("others", {"add_bos_token": False}, "<|end|> dog"),
    ],
    ids=str,
)
def test_ends_are_those_of_the_configuration(
    tmp_path: Path, kind: str, puts: str, flags: dict[str, Any], wanted: str
) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, kind, puts, **flags))
    plain = list(tokenizer.backend_tokenizer.encode("the dog", add_special_tokens=False).ids)
    expected: list[int] = []
    for name in wanted.split():
        expected += plain if name == "dog" else [tokenizer.convert_tokens_to_ids(name)]
    assert tokens_of(tokenizer, "the dog") == expected
    assert tokens_of(tokenizer, "the dog", add_special_tokens=False) == plain


def test_flags_that_are_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "byte_level", "nothing", add_bos_token="yes")
    with pytest.raises(SpeqError, match="has add_bos_token 'yes'; it must be true or false"):
        load_tokenizer(folder)


def test_two_beginnings_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, "byte_level", "first"))
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    with caplog.at_level(logging.WARNING, logger="speq"):
        encoder.encode("the dog")
        assert caplog.messages == []
        for text in ("<s>the dog", "<s>the", "<s>"):
            assert encoder.encode(text)[:2] == [tokenizer.bos_token_id] * 2
    (sentence,) = caplog.messages
    assert "begins with '<s>', which the tokenizer adds to texts itself" in sentence


def test_tokens_that_a_model_has_no_embeddings_of(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, "byte_level", "nothing"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    lacking = tokenizer.convert_tokens_to_ids("<think>")
    encoder = PromptEncoder(tokenizer, lacking)
    sentence = (
        f"the prompt holds the token '<think>' with the id {lacking}, and the model has embeddings "
        f"of {lacking} tokens: they were not enlarged when the tokenizer was; leave that token out"
    )
    for prompt in ("the <think>", [{"role": "user", "content": "<think>"}]):
        with pytest.raises(SpeqError) as raised:
            encoder.encode(prompt)
        assert str(raised.value).startswith(sentence)
    with pytest.raises(SpeqError, match=f"holds {lacking}; token ids are whole numbers from 0 to"):
        encoder.encode([lacking])


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
@pytest.mark.parametrize("declared", [None, "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_look_at_a_file_that_fails_once(
    declared: str | None, template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokenizer comes, or a sentence."""
    flags = {} if declared is None else {"tokenizer_class": declared}
    folder = folder_of(tmp_path, "byte_level", "both", **flags)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    look, looks, failing = os.stat, 0, 0

    def failing_look(path: Any, **options: Any) -> os.stat_result:
        nonlocal looks
        if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
            looks += 1
            if looks == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return look(path, **options)

    def loaded() -> tuple[Any, ...]:
        nonlocal looks
        looks = 0
        tokenizer = load_tokenizer(folder)
        ids = tokens_of(tokenizer, "the dog, Größe")
        ends = tokenizer.eos_token, tokenizer.bos_token
        return type(tokenizer), ids, tokenizer.decode(ids), *ends, tokenizer.chat_template

    monkeypatch.setattr(os, "stat", failing_look)
    wanted, said = loaded(), 0
    for failing in range(1, looks + 1):
        try:
            assert loaded() == wanted, failing
        except (SpeqError, OSError) as error:
            said += 1
            assert str(folder) in str(error)
    assert said > 0
