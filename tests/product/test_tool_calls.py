"""Calls of tools in text: the form of Hermes and Qwen, however the text is cut into pieces."""

import json
from itertools import count, pairwise

import pytest

from speq.generator import Token
from speq.text.answer_parts import Call, join_parts, parse_piece
from speq.text.tool_calls import CallParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>{"name": "clock"}</tool_call>'


def read(text: str, cuts: tuple[int, ...] = ()) -> tuple[str, list[Call]]:
    numbers = count(1)
    parser = CallParser(make_id=lambda: f"call_{next(numbers)}")
    ends = (0, *cuts, len(text))
    parts = [parser.feed(text[begin:end]) for begin, end in pairwise(ends)]
    parts.append(parser.finish())
    whole = join_parts(parts)
    return whole.text, [*whole.calls]


WEATHER_CALL = ("weather", {"place": "Oslo"})
CLOCK_CALL = ("clock", {})


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("plain text", "plain text", []),
        (" ends in space \n", " ends in space \n", []),
        (WEATHER, "", [WEATHER_CALL]),
        (f"{WEATHER}\n{CLOCK}", "", [WEATHER_CALL, CLOCK_CALL]),
        (f"Let me look.\n\n{WEATHER}\n", "Let me look.", [WEATHER_CALL]),
        (f"One.{CLOCK} Two. {WEATHER} Three.", "One.\nTwo.\nThree.", [CLOCK_CALL, WEATHER_CALL]),
        ("a <tool_call> of no form", "a <tool_call> of no form", []),
        ("<tool_call>{bad}</tool_call> x", "<tool_call>{bad}</tool_call> x", []),
        ('<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        (f"<tool_call>{{bad}}</tool_call> {CLOCK}", "<tool_call>{bad}</tool_call>", [CLOCK_CALL]),
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("", "", []),
    ],
)
def test_text_and_calls(text: str, said: str, calls: list[tuple[str, object]]) -> None:
    wanted = [
        (f"call_{number}", name, arguments)
        for number, (name, arguments) in enumerate(calls, start=1)
    ]
    every = (*((cut,) for cut in range(len(text) + 1)), tuple(range(1, len(text))))
    for cuts in every:
        told, found = read(text, cuts)
        assert told == said
        assert [(call.id, call.name, json.loads(call.arguments)) for call in found] == wanted


def test_text_is_told_as_soon_as_it_is_no_call() -> None:
    parser = CallParser()
    assert parser.feed("Hello").text == "Hello"
    assert parser.feed(" ").text == ""
    assert parser.feed("<tool").text == ""
    assert parser.feed("box").text == " <toolbox"
    assert parser.feed("\n<tool_call>{").text == ""
    assert parser.finish().text == "\n<tool_call>{"


def test_letters_of_any_script_stay_as_they_are() -> None:
    _, calls = read('<tool_call>{"name": "say", "arguments": {"a": "Grüße"}}</tool_call>')
    assert calls[0].arguments == '{"a": "Grüße"}'
    assert calls[0].content == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "say", "arguments": '{"a": "Grüße"}'},
    }


def test_ids_differ() -> None:
    parser = CallParser()
    first, second = parser.feed(CLOCK * 2).calls
    assert first.id != second.id
    assert first.id.startswith("call_")


@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {}}', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": ""}', [("f", {})]),
        ('{"name": "f", "arguments": null}', [("f", {})]),
        ('{"name": "f"}', [("f", {})]),
        ('{"id": "call_9", "name": "f"}', [("f", {})]),
        ('[{"name": "f"}, {"name": "g", "arguments": {}}]', [("f", {}), ("g", {})]),
        ('{"name": "f", "arguments": {"a": [1e300, null]}}', [("f", {"a": [1e300, None]})]),
        ('{"name": "f", "args": {"a": 1}}', []),
        ('{"name": "f", "arguments": [1]}', []),
        ('{"name": "f", "arguments": "b"}', []),
        ('{"name": "f", "arguments": 5}', []),
        ('{"name": "f", "arguments": {"a": NaN}}', []),
        ('{"name": "f", "arguments": {"a": -Infinity}}', []),
        ('{"name": "f", "arguments": {"a": 1e999}}', []),
        ('{"name": "f", "arguments": "{\\"a\\": NaN}"}', []),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', []),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", []),
        ('{"name": "", "arguments": {}}', []),
        ('[{"name": "f"}, {"name": 1}]', []),
        ("[]", []),
        ("[" * 100_000, []),
        ("{'name': 'f'}", []),
        ("", []),
    ],
    ids=lambda given: given[:50] if isinstance(given, str) else "",
)
def test_spellings_of_calls(inside: str, calls: list[tuple[str, object]]) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    told, found = read(text)
    assert [
        (call.name, json.loads(call.arguments, parse_constant=pytest.fail)) for call in found
    ] == (calls)
    assert told == ("" if calls else text)


@pytest.mark.parametrize("behind", ["", "\n", "\n</tool_", "</tool_call"])
def test_a_call_that_is_cut_off_is_one_if_its_json_is_whole(behind: str) -> None:
    told, found = read('Yes. <tool_call>{"name": "f"}' + behind)
    assert (told, [call.name for call in found]) == (
        ("Yes.", ["f"]) if not behind.strip() else ('Yes. <tool_call>{"name": "f"}' + behind, [])
    )
    told, found = read('<tool_call>{"name": "f"')
    assert (told, found) == ('<tool_call>{"name": "f"', [])


def heard(*tokens: Token) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser()
    parts = [*(parse_piece(parser, token) for token in tokens), parser.finish()]
    whole = join_parts(parts)
    return whole.text, [(call.name, call.arguments) for call in whole.calls]


BEGIN, END, EOS = "<tool_call>", "</tool_call>", "<|im_end|>"


@pytest.mark.parametrize(
    ("tokens", "said", "calls"),
    [
        (
            [
                ("Yes.\n", (6, BEGIN)),
                ('\n{"name": "f"', ()),
                ("}\n", ()),
                ("", (0, END)),
                ("", (0, EOS)),
            ],
            "Yes.",
            [("f", "{}")],
        ),
        ([("", (0, BEGIN)), ('{"name": "f"}', (13, END))], "", [("f", "{}")]),
        ([("", (0, BEGIN)), ('{"name": "f"}', ()), ("", (0, EOS))], "", [("f", "{}")]),
        ([("", (0, BEGIN)), ('{"name": "f"}</tool_call>', ())], "", [("f", "{}")]),
        (
            [("a ", ()), ("", (0, BEGIN)), ("{bad}", ()), ("", (0, END)), (" b", ())],
            "a {bad} b",
            [],
        ),
        ([("a", (1, EOS)), ("b", (0, END))], "ab", []),
        ([("<tool_call>{", (12, EOS)), ('"name": "f"}', (12, END))], "", [("f", "{}")]),
    ],
    ids=["usual", "one token", "cut off", "spelled end", "no call", "others", "within"],
)
def test_marks_that_are_special_tokens(
    tokens: list[tuple[str, tuple[int, str]]], said: str, calls: list[tuple[str, str]]
) -> None:
    made = [
        Token(number, text, special=(special,) if special else ())
        for number, (text, special) in enumerate(tokens)
    ]
    assert heard(*made) == (said, calls)
