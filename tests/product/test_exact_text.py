"""From text to text with tokenizers as models are published with: what comes out is what plain
transformers encodes, generates and decodes, whatever the draft length and budget.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.helpers.cells import Cell, loaded
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model
from tests.helpers.trained_tokenizers import BYTES, KINDS, LINES

NEW_TOKENS = 24
CELLS = (
    Cell(0, "two slots", "own"),
    Cell(3, "all", "own", prefetch="three-phase"),
    Cell(None, "all", "own", drafter="ngram"),
)
# Llama's byte for the end of a line is a character.
NO_CHARACTERS = [token for token in BYTES if token != "<0x0A>"]
CHAT = [{"role": "user", "content": "Der Café, 12 € und 日本 👩‍👧!"}]
TEXTS = [LINES[0][:30], "It costs 7 €, 日本語 👍🏽 and [INST] <|im_start|>x"]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = KINDS[request.param]()
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    write_model(folder, "qwen3_moe", vocab_size=len(tokenizer), seed=4, **ends)
    tokenizer.save_pretrained(folder)
    mute(folder, [tokenizer.convert_tokens_to_ids(token) for token in NO_CHARACTERS])
    return folder


def mute(folder: Path, tokens: list[int | None]) -> None:
    """Make tokens unlikely, those that a tokenizer has: a random model writes bytes that form no
    characters, and what these are decoded to is not defined.
    """
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][[token for token in tokens if token is not None]] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.wide
def test_text_is_what_transformers_writes(model: Path) -> None:
    """Of texts, which the answer goes on from, and of a chat, in which it begins."""
    tokenizer, plain = AutoTokenizer.from_pretrained(model), load_plain(model)
    asked: list[tuple[Any, list[int], str]] = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        made = greedy_tokens(plain, ids, NEW_TOKENS)
        whole, before = decoded(tokenizer, [*ids, *made]), decoded(tokenizer, ids)
        assert whole.startswith(before)
        asked.append((text, made, whole[len(before) :]))
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    made = greedy_tokens(plain, ids, NEW_TOKENS)
    asked.append((CHAT, made, decoded(tokenizer, made)))
    for cell in CELLS:
        generator, _ = loaded(cell, model, "auto", "float32", 200)
        for prompt, made, wanted in asked:
            result = generator.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert result.token_ids == made, cell
            assert result.text == wanted, cell
            if cell.draft_length != 3:
                continue
            pieces = generator.stream(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert "".join(token.text for token in pieces) == wanted
            # Up to the first of what stands in the midst of it.
            stop = wanted[len(wanted) // 2 :][:3]
            options: Any = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "stop": (stop,)}
            result = generator.generate(prompt, **options)
            assert result.text == wanted[: wanted.index(stop)]
        generator.close()
