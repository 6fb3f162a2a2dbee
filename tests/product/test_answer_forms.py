"""Thoughts and channels of answers, however they are cut into pieces."""

import json
import re
from itertools import pairwise

import pytest

from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import AnswerParser, AnswerPart, join_parts, parse_piece
from speq.text.harmony import HarmonyParser
from speq.text.stream import TextPiece
from speq.text.thoughts import THINK, THOUGHTS, ThoughtParser
from speq.text.tool_calls import CallParser
from speq.text.wrapped_answer import WrappedParser

CALL = '<tool_call>{"name": "f"}</tool_call>'


def cut(text: str) -> list[tuple[int, ...]]:
    """Places to cut a text at: each alone, and all of them."""
    return [*((place,) for place in range(len(text) + 1)), tuple(range(1, len(text)))]


def read(parser: AnswerParser, text: str, cuts: tuple[int, ...]) -> AnswerPart:
    ends = (0, *cuts, len(text))
    parts = [parse_piece(parser, TextPiece(text[begin:end])) for begin, end in pairwise(ends)]
    return join_parts([*parts, parser.finish()])


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "said"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", False, "Why?", "So."),
        (" \n<think>Why?</think>So. <think>", False, "Why?", "So. <think>"),
        ("Why?\n</think>\n\nSo.\n", True, "Why?", "So.\n"),
        ("<think>\n\n</think>\n\nSo.", False, "", "So."),
        ("</think>So.", True, "", "So."),
        ("So. </think>", False, "", "So. </think>"),
        ("<thin", False, "", "<thin"),
        ("  So.", False, "", "  So."),
        ("<think>Why? </thi", False, "Why? </thi", ""),
        ("Why?", True, "Why?", ""),
        ("a < b\n\n</b>", True, "a < b\n\n</b>", ""),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts(text: str, thinking: bool, reasoning: str, said: str) -> None:
    for cuts in cut(text):
        part = read(ThoughtParser(thinking=thinking), text, cuts)
        assert (part.reasoning, part.text) == (reasoning, said)


@pytest.mark.parametrize(
    "text", [f"<think>f?</think>\n{CALL}", f"<think>{CALL}</think>Yes. {CALL}"]
)
def test_calls_behind_thoughts(text: str) -> None:
    for cuts in cut(text):
        part = read(ThoughtParser(CallParser(tools=())), text, cuts)
        assert [call.name for call in part.calls] == ["f"]
        assert part.text in ("", "Yes.")
        assert part.reasoning in ("f?", CALL)


def test_marks_of_thoughts_that_are_special_tokens() -> None:
    parser = ThoughtParser(CallParser())
    pieces = [
        TextPiece("\n", ((1, "<think>"),)),
        TextPiece("Why?", ((2, "<|other|>"),)),
        TextPiece("\n", ((1, "</think>"),)),
        TextPiece("\nSo."),
        TextPiece('{"name": "f"}', ((0, "<tool_call>"), (13, "</tool_call>"))),
    ]
    part = join_parts([*(parse_piece(parser, each) for each in pieces), parser.finish()])
    assert (part.reasoning, part.text) == ("Why?", "So.")
    assert [call.name for call in part.calls] == ["f"]


@pytest.mark.parametrize(
    ("end", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("x", False)]
)
def test_a_prompt_may_end_within_a_thought(end: str, thinking: bool) -> None:
    parser = AnswerForm(thoughts=THINK).parser(end, [])
    assert parser is not None
    part = read(parser, "a</think>b", ())
    assert part == (AnswerPart("b", (), "a") if thinking else AnswerPart("a</think>b"))


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("<|channel>thought\nWhy?\n<channel|>So.", "Why?", "So."),
        ("<|channel>thought\n<channel|>So.", "", "So."),
        ("<|channel>thought<channel|>So.", "", "So."),
        ("<|channel>thoughts\nWhy?<channel|>So.", "thoughts\nWhy?", "So."),
        ("<|channel>Why?<channel|>So.", "Why?", "So."),
        ("<|channel>thou", "thou", ""),
        ("<|channel>thought", "", ""),
        ("So.", "", "So."),
    ],
)
def test_thoughts_with_a_heading(text: str, reasoning: str, said: str, size: int) -> None:
    gemma = THOUGHTS[1]
    parser = ThoughtParser(None, False, gemma)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    part = join_parts([*(parser.feed(piece) for piece in pieces), parser.finish()])
    assert (part.reasoning, part.text) == (reasoning, said)
    marked = ThoughtParser(None, False, gemma)
    parts = [
        marked.mark(each) if each in (gemma.begin, gemma.end) else marked.feed(each)
        for each in re.split(r"(<\|channel>|<channel\|>)", text)
    ]
    part = join_parts([*parts, marked.finish()])
    assert (part.reasoning, part.text) == (reasoning, said)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("\n<answer>\nSo. <b>\n</answer>\n", "So. <b>", []),
        ("<answer>So.", "So.", []),
        ("<answer></answer>", "", []),
        ("<answer>So.</answer> More.", "So.More.", []),
        ("So. <answer>a</answer>", "So. <answer>a</answer>", []),
        ("<ans", "<ans", []),
        ('<answer>Yes.\n<tool_call>{"name": "f"}</tool_call>\n</answer>', "Yes.", ["f"]),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
    ],
)
def test_answers_between_marks(text: str, said: str, calls: list[str], size: int) -> None:
    parser = WrappedParser("<answer>", "</answer>", CallParser())
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    part = join_parts([*(parser.feed(piece) for piece in pieces), parser.finish()])
    assert (part.text, [call.name for call in part.calls]) == (said, calls)
    marked = WrappedParser("<answer>", "</answer>", CallParser())
    parts = [
        marked.mark(each) if each.startswith("<") and each.endswith(">") else marked.feed(each)
        for each in re.split(r"(</?answer>|</?tool_call>)", text)
    ]
    part = join_parts([*parts, marked.finish()])
    if "So. <answer>" not in text:  # in the midst of a text a special token is not told
        assert (part.text, [call.name for call in part.calls]) == (said, calls)


SAID = "<|start|>assistant<|channel|>final<|message|>"
FIND = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"


def pieces_of(text: str, size: int) -> list[TextPiece]:
    """A text in pieces of so many characters at most; names of special tokens as these."""
    made = []
    for part in re.split(r"(<\|\w+\|>)", text):
        if part.startswith("<|"):
            made.append(TextPiece("", ((0, part),)))
        else:
            made += [TextPiece(part[at : at + size]) for at in range(0, len(part), size)]
    return made


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "said", "calls"),
    [
        (f"<|channel|>analysis<|message|>Why?<|end|>{SAID}Hello.", "Why?", "Hello.", []),
        ("<|channel|>final<|message|>Hello.<|return|>", "", "Hello.", []),
        (
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis"
            f"<|message|>b<|end|>{SAID}c",
            "a\n\nb",
            "c",
            [],
        ),
        (
            f'<|channel|>analysis<|message|>a<|end|><|start|>assistant{FIND}{{"most": 1}}<|call|>',
            "a",
            "",
            [("find", {"most": 1})],
        ),
        # Cut off before the mark that ends it; and the recipient in the role.
        (f'{FIND}{{"most": 1}}', "", "", [("find", {"most": 1})]),
        (
            " to=functions.find<|channel|>commentary<|message|>{}<|call|>",
            "",
            "",
            [("find", {})],
        ),
        # What is said to the user before a call.
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FIND}<|call|>",
            "",
            "I look.",
            [("find", {})],
        ),
        (f"{FIND}no JSON<|call|>", "", "no JSON", []),
        ("<|channel|>analysis<|message|>unfinished", "unfinished", "", []),
        ("<|channel|>ana", "", "", []),
        ("no marks at all", "", "no marks at all", []),
    ],
)  # fmt: skip
def test_channels(
    text: str, reasoning: str, said: str, calls: list[tuple[str, object]], size: int
) -> None:
    parser = HarmonyParser()
    parts = [*(parse_piece(parser, each) for each in pieces_of(text, size)), parser.finish()]
    part = join_parts(parts)
    assert (part.reasoning, part.text) == (reasoning, said)
    assert [(call.name, json.loads(call.arguments)) for call in part.calls] == calls


def test_channels_are_told_as_they_come() -> None:
    parser = HarmonyParser()
    told = [parse_piece(parser, each) for each in pieces_of(f"{SAID}Hel", 1)]
    assert "".join(part.text for part in told) == "Hel"
    assert parser.finish() == AnswerPart()
