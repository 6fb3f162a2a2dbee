"""Text of tokens as they come, for every kind of tokenizer, against decoding all at once."""

import random
from typing import Any

import pytest

from speq.text.stream import TextStream
from speq.text.vocabulary import Vocabulary
from tests.helpers.tokenizer_kinds import KINDS, tokenizer_of

TEXTS = (
    *("dog", " ", "the dog", "running", "\n", "a", "é", "e\u0301", "日本", "한", "€", "\u2581"),
    *("😀", "😀😀😀", "👩‍👩‍👧‍👦", "🇩🇪", "🏳️‍🌈", "\u200b", "\U00010348", "<think>", " wide ", "."),
    *("<|end|>", "<tool_call>", "\ufffd"),
)
# Kinds in which a character may be several tokens.
OF_BYTES = ("byte_level", "byte_fallback", "gemma_like", "unigram_with_bytes")
BYTES_ALONE = OF_BYTES[1:]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def told(tokenizer: Any, prompt: list[int], answer: list[int]) -> tuple[list[str], str]:
    """A piece for each token, and the rest."""
    stream = TextStream(Vocabulary(tokenizer), context_ids=prompt)
    pieces = [stream.feed(token_id).text for token_id in answer]
    return pieces, stream.finish().text


def added(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    raw = tokenizer.backend_tokenizer
    before, all_of_it = raw.decode(prompt), raw.decode(prompt + answer)
    assert all_of_it.startswith(before)
    return str(all_of_it[len(before) :])


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randint(0, 8)))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_an_answer_is_what_it_adds_to_its_prompt(tokenizer: Any) -> None:
    rng = random.Random(31)
    for _ in range(300):
        prompt, answer = (ids_of(tokenizer, random_text(rng)) for _ in range(2))
        pieces, rest = told(tokenizer, prompt, answer)
        assert "".join(pieces) + rest == added(tokenizer, prompt, answer)


def test_cuts_between_tokens_of_one_text(tokenizer: Any) -> None:
    """Cut where the prompt's characters are whole."""
    rng = random.Random(32)
    for _ in range(100):
        ids = ids_of(tokenizer, random_text(rng).replace("\ufffd", ""))
        whole = [
            cut
            for cut in range(len(ids) + 1)
            if tokenizer.backend_tokenizer.decode(ids).startswith(
                tokenizer.backend_tokenizer.decode(ids[:cut])
            )
        ]
        cut = rng.choice(whole)
        pieces, rest = told(tokenizer, ids[:cut], ids[cut:])
        assert "".join(pieces) + rest == added(tokenizer, ids[:cut], ids[cut:])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BYTES_ALONE])
def test_random_tokens(kind: str) -> None:
    """Of any bytes, where decoding at once keeps what is whole; ids without a token add nothing."""
    tokenizer = tokenizer_of(kind)
    rng = random.Random(33)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer) + 5) for _ in range(rng.randint(0, 20))]
        pieces, rest = told(tokenizer, [], ids)
        assert "".join(pieces) + rest == added(tokenizer, [], ids)


def each_byte(data: bytes) -> str:
    """Characters of UTF-8, and U+FFFD for each byte that is of none."""
    text = ""
    while data:
        for length in range(1, 5):
            try:
                text += data[:length].decode()
            except UnicodeDecodeError:
                continue
            data = data[length:]
            break
        else:
            text, data = text + "\ufffd", data[1:]
    return text


@pytest.mark.parametrize("kind", BYTES_ALONE)
def test_bytes_that_are_no_characters(kind: str) -> None:
    """What was told stays, whatever byte comes behind it."""
    tokenizer = tokenizer_of(kind)
    rng = random.Random(34)
    broken = 0
    for _ in range(300):
        data = b"".join(
            rng.choice([b"\xff", b"\xf0\x9f", "😀".encode(), "€".encode(), b"A"]) for _ in range(5)
        )
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
        pieces, rest = told(tokenizer, ids_of(tokenizer, "a"), ids)
        assert "".join(pieces) + rest == each_byte(data)
        broken += "\ufffd" in "".join(pieces) + rest
    assert broken > 100


@pytest.mark.parametrize("kind", OF_BYTES)
def test_characters_are_told_as_soon_as_they_are_whole(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for prompt in ("a", "a 😀", "a 😀😀", "日本語日本語", "😀😀😀"):
        ids = ids_of(tokenizer, prompt + "😀€日")[len(ids_of(tokenizer, prompt)) :]
        pieces, rest = told(tokenizer, ids_of(tokenizer, prompt), ids)
        assert [piece for piece in pieces if piece] == ["😀", "€", "日"]
        assert rest == ""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_where_they_came(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream = TextStream(Vocabulary(tokenizer))
    end, dog = tokenizer.convert_tokens_to_ids("<|end|>"), ids_of(tokenizer, "dog")
    for token_id in [end, *dog, end, end]:
        stream.write(token_id, last=False)
    stream.write(end, last=True)
    seen, text = [], ""
    for piece in stream.take():
        seen += [(len(text) + at, name) for at, name in piece.special]
        text += piece.text
    assert text == tokenizer.backend_tokenizer.decode(dog)
    assert seen == [(at, "<|end|>") for at in (0, len(text), len(text), len(text))]


def test_a_special_token_within_a_character_comes_behind_it() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    first, *others = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "😀".encode()]
    stream = TextStream(Vocabulary(tokenizer))
    pieces = [stream.feed(token_id) for token_id in [first, end, *others]]
    assert [piece for piece in pieces if piece != ("", ())] == [("😀", ((1, "<|end|>"),))]
    assert pieces[-1].text == "😀"


class Counted:
    """Counts what a tokenizer decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.tokens += len(ids)
        return str(self._tokenizer.decode(ids, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["special", "broken", "characters", "absent", "words"])
def test_tokens_are_decoded_a_few_times_each(kind: str, what: str) -> None:
    """However many have come before, and whether they had any text."""
    tokenizer = tokenizer_of(kind)
    unit = {
        "special": [tokenizer.convert_tokens_to_ids("<|end|>")],
        "broken": [tokenizer.convert_tokens_to_ids("<0xFF>" if kind != "byte_level" else "ÿ") or 0],
        "characters": ids_of(tokenizer, "日😀"),
        "absent": [len(tokenizer) + 1],
        "words": ids_of(tokenizer, "dog"),
    }[what]
    counted = Counted(tokenizer)
    stream = TextStream(Vocabulary(counted), context_ids=ids_of(tokenizer, "the dog"))
    counted.tokens = 0
    for token_id in unit * (4000 // len(unit)):
        stream.feed(token_id)
    assert counted.tokens <= 40 * 4000
