"""What tokens are called in log-probabilities, for every kind of tokenizer."""

from typing import Any

import pytest

from speq.engine.logprobs import TokenLogprobs
from speq.generator import Token
from speq.server.token_logprobs import chat_entry, completion_lists
from speq.text.vocabulary import Vocabulary
from tests.helpers.tokenizer_kinds import KINDS, tokenizer_of


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def test_every_token_has_a_name_of_its_own(tokenizer: Any) -> None:
    """As many entries as were asked for, and the drawn one among them under its own name."""
    vocabulary, count = Vocabulary(tokenizer), len(tokenizer)
    for begin in range(0, count - 20, 7):
        ids = range(begin, begin + 20)
        top = tuple((token_id, -0.5 - token_id) for token_id in ids)
        for drawn in (begin + 3, count - 1):
            token = Token(drawn, "", TokenLogprobs(-0.5 - drawn, top))
            lists = completion_lists(vocabulary, [token], 0)
            (table,) = lists["top_logprobs"]
            assert len(table) == 20 + (drawn not in ids)
            assert table[lists["tokens"][0]] == lists["token_logprobs"][0] == -0.5 - drawn
            assert sorted(table.values()) == sorted(
                {*(logprobs for _, logprobs in top), -0.5 - drawn}
            )


def test_names_add_up_to_the_text(tokenizer: Any) -> None:
    """Of tokens that stand within a text: their bytes are those of the text."""
    vocabulary = Vocabulary(tokenizer)
    first, *ids = tokenizer("the dog 😀€日 running é", add_special_tokens=False)["input_ids"]
    raw = tokenizer.backend_tokenizer
    text = raw.decode([first, *ids])[len(raw.decode([first])) :]
    data = b"".join(vocabulary.data(token_id) for token_id in ids)
    assert data.decode(errors="replace") == text
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert vocabulary.name(end) == "<|end|>"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_parts_of_characters_go_by_their_bytes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    first = tokenizer.convert_tokens_to_ids("<0xF0>" if kind == "byte_fallback" else "ð")
    token = Token(first, "", TokenLogprobs(-0.5, ((first, -0.5),)))
    vocabulary = Vocabulary(tokenizer)
    entry = chat_entry(vocabulary, token)
    told = {"token": "bytes:\\xf0", "logprob": -0.5, "bytes": [0xF0]}
    assert entry == told | {"top_logprobs": [told]}
    lists = completion_lists(vocabulary, [token], 5)
    assert lists == {
        "tokens": ["bytes:\\xf0"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"bytes:\\xf0": -0.5}],
        "text_offset": [5],
    }
