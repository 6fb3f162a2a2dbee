"""Text out of tokens, piece by piece, against decoding everything at once."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from speq.text.stream import TextPiece, TextStream
from speq.text.vocabulary import Vocabulary
from tests.helpers.paths import BUNDLED
from tests.helpers.tiny_models import VOCAB, write_tokenizer

TEXTS = (
    "Plain words, a number 1234 and\n\ttabs.",
    "naïve café \u2013 “quoted” — 12 € … ½",
    "日本語のテキストと한국어, русский, עברית",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 🏳️‍🌈 and 🤷🏽‍♀️",
    "e\u0301 combining, \u200bzero width, \U00010348 gothic, \U000e0041 tag",
    "real \ufffd replacement \ufffd\ufffd characters \ufffd",
)
STOPPED = "one two three, two and a half; zwei € two three\n\nfour: tw"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte."""
    path = tmp_path_factory.mktemp("bytes")
    write_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module", params=["bundled", "bytes"])
def tokenizer(request: pytest.FixtureRequest, byte_tokenizer: Any) -> Any:
    return byte_tokenizer if request.param == "bytes" else AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def spaced_tokenizer() -> Any:
    """In the way of SentencePiece: a space belongs to the word behind it, but for the first."""
    words = [
        "\u2581one",
        "\u2581two",
        "\u2581three",
        "\u2581half",
        "\u2581",
        "o",
        "w",
        "t",
        ",",
        ";",
    ]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {word: 257 + at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def decode(tokenizer: Any, ids: list[int]) -> str:
    """All of it at once."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    """A piece for each token, up to a stop."""
    pieces = []
    for token_id in ids:
        pieces.append(stream.feed(token_id).text)
        if stream.stopped:
            break
    return pieces


def texts_of(pieces: list[TextPiece]) -> list[str]:
    return [piece.text for piece in pieces]


def random_ids(tokenizer: Any, rng: random.Random, count: int) -> list[int]:
    special = tokenizer.eos_token_id
    vocabulary = min(len(tokenizer), VOCAB - 7 if len(tokenizer) < 300 else len(tokenizer))
    return [special if rng.random() < 0.05 else rng.randrange(vocabulary) for _ in range(count)]


def test_random_tokens_add_up(tokenizer: Any) -> None:
    rng = random.Random(21)
    incomplete = 0
    for _ in range(60):
        ids = random_ids(tokenizer, rng, rng.randint(0, 50))
        stream = TextStream(Vocabulary(tokenizer))
        pieces = pieces_of(stream, ids)
        last = stream.finish().text
        incomplete += "" in pieces
        assert "".join(pieces) + last == decode(tokenizer, ids)
    assert incomplete > 0


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:5])
def test_texts_add_up(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(Vocabulary(tokenizer))
    pieces = pieces_of(stream, ids)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert "".join(pieces) + stream.finish().text == text


@pytest.mark.parametrize("text", TEXTS[:5], ids=lambda text: text[:5])
def test_characters_come_once_their_last_byte_does(byte_tokenizer: Any, text: str) -> None:
    data = text.encode()
    ids = byte_tokenizer(text)["input_ids"]
    assert len(ids) == len(data)
    stream = TextStream(Vocabulary(byte_tokenizer))
    so_far = ""
    for count, token_id in enumerate(ids, start=1):
        so_far += stream.feed(token_id).text
        assert so_far == data[:count].decode(errors="ignore")
    assert stream.finish().text == ""


def test_spaces_between_words_are_kept(spaced_tokenizer: Any) -> None:
    """Decoded by itself a token would lose the space before it."""
    rng = random.Random(23)
    vocabulary = spaced_tokenizer.get_vocab()
    parts = [
        ["\u2581one"],
        ["\u2581two"],
        ["\u2581half"],
        ["\u2581"],
        ["o", "w"],
        [","],
        ["<|end|>"],
        [f"<0x{byte:02X}>" for byte in "€".encode()],
        [f"<0x{byte:02X}>" for byte in "👩".encode()],
    ]
    for _ in range(200):
        chosen = rng.choices(parts, k=rng.randint(1, 12))
        ids = [vocabulary[token] for part in chosen for token in part]
        stream = TextStream(Vocabulary(spaced_tokenizer))
        pieces = pieces_of(stream, ids)
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish().text == decode(spaced_tokenizer, ids)
    ids = [vocabulary[token] for token in ("\u2581one", "\u2581two", "\u2581three")]
    assert pieces_of(TextStream(Vocabulary(spaced_tokenizer)), ids) == ["one", " two", " three"]


def test_special_tokens_leave_no_text(byte_tokenizer: Any) -> None:
    end = byte_tokenizer.eos_token_id
    euro = byte_tokenizer("€")["input_ids"]
    stream = TextStream(Vocabulary(byte_tokenizer))
    ids = [end, *euro[:2], end, euro[2], end, end]
    assert pieces_of(stream, ids) == ["", "", "", "", "€", "", ""]
    assert stream.finish().text == ""


def test_incomplete_character_comes_at_the_end(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("ab€")["input_ids"]
    stream = TextStream(Vocabulary(byte_tokenizer))
    assert pieces_of(stream, ids[:-1]) == ["a", "b", "", ""]
    assert stream.finish().text == "\ufffd"
    assert stream.finish().text == ""


def given_out(text: str, stops: tuple[str, ...]) -> str:
    """What may be shown of a text that may go on: up to what could yet become a stop string."""
    begun = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
    return text[: len(text) - max(begun, default=0)]


def expected_pieces(
    tokenizer: Any, ids: list[int], stops: tuple[str, ...]
) -> tuple[list[str], bool]:
    """The text to have been given out after each token, by decoding from the start each time."""
    shown = []
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count])
        if text.endswith("\ufffd"):
            shown.append(shown[-1] if shown else "")
            continue
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return [*shown, text[: min(found)]], True
        shown.append(given_out(text, stops))
    return shown, False


@pytest.mark.parametrize(
    "stops",
    [
        ("two",),
        (" two three\n\nfour",),
        ("zwei", "half"),
        ("t", "two"),
        ("three\n", "three, two and", "three, tw€"),
        ("aaa", "€ two thrEe", "€ two three\n\n"),
        ("twx", "owt", "f: "),
        ("absent",),
        ("four: two",),
    ],
    ids=str,
)
def test_stop_strings(tokenizer: Any, stops: tuple[str, ...]) -> None:
    ids = tokenizer(STOPPED)["input_ids"]
    shown, stopped = expected_pieces(tokenizer, ids, stops)
    stream = TextStream(Vocabulary(tokenizer), stops)
    so_far = ""
    pieces = pieces_of(stream, ids)
    for piece, wanted in zip(pieces, shown, strict=True):
        so_far += piece
        assert so_far == wanted
    assert stream.stopped is stopped
    rest = stream.finish().text
    assert so_far + rest == (shown[-1] if stopped else STOPPED)


def test_random_texts_with_overlapping_stops(byte_tokenizer: Any) -> None:
    rng = random.Random(22)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        text = "".join(rng.choice("ab€") for _ in range(rng.randint(1, 14)))
        stops = tuple(
            "".join(rng.choice("ab€") for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 3))
        )
        ids = byte_tokenizer(text)["input_ids"]
        shown, stopped = expected_pieces(byte_tokenizer, ids, stops)
        stream = TextStream(Vocabulary(byte_tokenizer), stops)
        pieces = pieces_of(stream, ids)
        assert ["".join(pieces[: n + 1]) for n in range(len(pieces))] == shown
        assert stream.stopped is stopped
        assert "".join(pieces) + stream.finish().text == (shown[-1] if stopped else text)
        outcomes[stopped] += 1
    assert min(outcomes.values()) > 30


class Words:
    """A tokenizer whose tokens are whole strings, and which tells nothing more of them."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.added_tokens_decoder: dict[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {word: token_id for token_id, word in enumerate(self.words)}

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(self.words[token_id] for token_id in ids)


def test_stop_inside_one_piece() -> None:
    stream = TextStream(Vocabulary(Words("before STOP after")), ("STOP",))
    assert stream.feed(0).text == "before "
    assert stream.stopped
    assert stream.finish().text == ""


def test_earliest_of_several_stops_in_one_piece_wins() -> None:
    stream = TextStream(Vocabulary(Words("a second b first c")), ("first", "second", " b first"))
    assert stream.feed(0).text == "a "
    assert stream.stopped


def test_stop_over_several_pieces() -> None:
    stream = TextStream(Vocabulary(Words("x #", "#", "#", " y")), ("###",))
    assert pieces_of(stream, [0, 1, 2, 3]) == ["x ", "", ""]
    assert stream.stopped


def test_beginning_of_a_stop_that_is_none_is_given_out() -> None:
    stream = TextStream(Vocabulary(Words("x ##", "! ##", "##", " y")), ("##!?", "###!"))
    assert pieces_of(stream, [0, 1, 2, 3]) == ["x ", "##! ", "#", "### y"]
    assert not stream.stopped


def test_nothing_is_held_back_after_the_end() -> None:
    stream = TextStream(Vocabulary(Words("x ##", "#")), ("####",))
    assert pieces_of(stream, [0, 1]) == ["x ", ""]
    assert stream.finish().text == "###"
    assert not stream.stopped
    assert stream.finish().text == ""


def test_stop_at_the_very_end() -> None:
    stream = TextStream(Vocabulary(Words("x", " end")), (" end",))
    assert pieces_of(stream, [0, 1]) == ["x", ""]
    assert stream.stopped
    assert stream.finish().text == ""


def test_stop_that_only_the_end_completes(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("ab€")["input_ids"]
    stream = TextStream(Vocabulary(byte_tokenizer), ("b\ufffd",))
    assert "".join(pieces_of(stream, ids[:-1])) == "a"
    assert not stream.stopped
    assert stream.finish().text == ""
    assert stream.stopped


def test_bundled_tokenizer_splits_characters() -> None:
    """The texts above do put characters on several tokens of the real tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    ids = tokenizer(TEXTS[3])["input_ids"]
    assert any("\ufffd" in decode(tokenizer, [token_id]) for token_id in ids)


def test_text_that_goes_on_keeps_its_first_space() -> None:
    """Some tokenizers put a space before each word, and drop it where a text begins."""
    words = {"\u2581a": 0, "\u2581dog": 1, "\u2581runs": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="\u2581a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.decode([0, 1, 2]) == "a dog runs"
    going_on = TextStream(Vocabulary(fast), context_ids=[0, 1])
    assert going_on.feed(2).text + going_on.finish().text == " runs"
    beginning = TextStream(Vocabulary(fast))
    assert beginning.feed(2).text + beginning.finish().text == "runs"


def test_written_tokens_have_a_piece_each_and_the_last_one_the_rest() -> None:
    stream = TextStream(Vocabulary(Words("x #", "#", " y", " #", "#", "#")), ("###",))
    assert [stream.write(token, last=False) for token in range(3)] == [False] * 3
    assert texts_of(stream.take()) == ["x ", "", "## y"]
    assert [stream.write(token, last=token == 4) for token in (3, 4)] == [False] * 2
    assert texts_of(stream.take()) == [" ", "##"]
    assert stream.take() == []


def test_a_written_token_tells_of_the_stop_string_it_completes() -> None:
    stream = TextStream(Vocabulary(Words("x #", "#", "# y")), ("###",))
    assert [stream.write(token, last=token == 2) for token in range(3)] == [False, False, True]
    assert "".join(texts_of(stream.take())) == "x "


MARKED_STOPS = (
    ("<|end|>",),
    ("b<|end|>",),
    ("<|end|>c", "zz"),
    ("a<|end|><|end|>b", "<|end|>c"),
    ("<|end|>\nb", "ab"),
)


@pytest.mark.parametrize("stops", MARKED_STOPS, ids=str)
def test_stops_that_hold_special_tokens(byte_tokenizer: Any, stops: tuple[str, ...]) -> None:
    """Beside the same search in the text with special tokens, from the start at each token."""
    rng = random.Random(24)
    end = byte_tokenizer.eos_token_id
    outcomes = {True: 0, False: 0}
    for _ in range(200):
        ids = rng.choices([end, *byte_tokenizer("abc\n")["input_ids"]], k=rng.randint(1, 12))
        stream = TextStream(Vocabulary(byte_tokenizer), stops)
        told = ""
        for count, token_id in enumerate(ids, start=1):
            told += stream.feed(token_id).text
            seen = byte_tokenizer.decode(ids[:count])
            plain = decode(byte_tokenizer, ids[:count])
            at = [seen.find(stop) for stop in stops if "<" in stop and stop in seen]
            before = [len(seen[:cut].replace("<|end|>", "")) for cut in at]
            before += [plain.find(stop) for stop in stops if "<" not in stop and stop in plain]
            assert stream.stopped is bool(before)
            if before:
                assert told == plain[: min(before)]
                break
            assert plain.startswith(told)
        outcomes[stream.stopped] += 1
        if not stream.stopped:
            assert told + stream.finish().text == decode(byte_tokenizer, ids)
    assert min(outcomes.values()) > 20


def test_a_stop_that_is_spelled_stops_as_well(byte_tokenizer: Any) -> None:
    """As text of many tokens, where the tokenizer has a special one of the same text."""
    letters = [byte_tokenizer.convert_tokens_to_ids(letter) for letter in "ab<|end|>c"]
    stream = TextStream(Vocabulary(byte_tokenizer), ("<|end|>",))
    assert "".join(pieces_of(stream, letters)) == "ab"
    assert stream.stopped


def test_special_tokens_in_held_text_come_with_it(byte_tokenizer: Any) -> None:
    end = byte_tokenizer.eos_token_id
    stream = TextStream(Vocabulary(byte_tokenizer), ("xyz",))
    ids = byte_tokenizer("axy")["input_ids"]
    fed = [stream.feed(token_id) for token_id in [*ids, end, *byte_tokenizer("b")["input_ids"]]]
    assert fed == [("a", ()), ("", ()), ("", ()), ("", ()), ("xyb", ((2, "<|end|>"),))]
