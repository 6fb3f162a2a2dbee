"""Calls of tools in text: the form of Hermes and Qwen, however the text is cut into pieces."""

import json
from itertools import count, pairwise

import pytest

from speq.server.tool_calls import Call, CallParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>{"name": "clock"}</tool_call>'


def read(text: str, cuts: tuple[int, ...] = ()) -> tuple[str, list[Call]]:
    numbers = count(1)
    parser = CallParser(lambda: f"call_{next(numbers)}")
    ends = (0, *cuts, len(text))
    parts = [parser.feed(text[begin:end]) for begin, end in pairwise(ends)]
    parts.append(parser.finish())
    return "".join(part.text for part in parts), [call for part in parts for call in part.calls]


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
        (
            '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
            '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
            [],
        ),
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
