"""Calls of tools as families write them, between their marks."""

import json
from typing import Any

import pytest

from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import join_parts, parse_piece
from speq.text.call_syntax import MOST_PYTHON, SYNTAXES, CallSyntax, calls_in
from speq.text.stream import TextPiece
from speq.text.tool_calls import CallParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "most": {"type": "integer"},
                    "where": {"type": "array"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    }
]
MINIMAX, DEEPSEEK, LFM2, HERMES = SYNTAXES
DS = [f"<\uff5ctool▁{name}\uff5c>" for name in ("call▁begin", "sep", "call▁end")]
WHOLE = {"text": "5", "most": 5, "where": ["a", {"b": 1}]}


@pytest.mark.parametrize(
    ("syntax", "inside", "calls"),
    [
        (
            HERMES,
            "\n<function=find>\n<parameter=text>\n5\n</parameter>\n<parameter=most>\n5\n"
            '</parameter>\n<parameter=where>\n["a", {"b": 1}]\n</parameter>\n</function>\n',
            [("find", WHOLE)],
        ),
        (
            HERMES,
            "find\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n<arg_key>most</arg_key>\n"
            "<arg_value>5</arg_value><arg_key>where</arg_key>"
            '<arg_value>["a", {"b": 1}]</arg_value>',
            [("find", WHOLE)],
        ),
        (
            MINIMAX,
            '\n<invoke name="find">\n<parameter name="text">5</parameter>\n'
            '<parameter name="most">5</parameter>\n<parameter name="where">["a", {"b": 1}]'
            "</parameter>\n</invoke>\n",
            [("find", WHOLE)],
        ),
        (DEEPSEEK, f"{DS[0]}find{DS[1]}{json.dumps(WHOLE)}{DS[2]}", [("find", WHOLE)]),
        (
            DEEPSEEK,
            f"{DS[0]}function{DS[1]}find\n```json\n{json.dumps(WHOLE)}\n```{DS[2]}",
            [("find", WHOLE)],
        ),
        (LFM2, "[find(text='5', most=5, where=['a', {'b': 1}])]", [("find", WHOLE)]),
        (LFM2, json.dumps([{"name": "find", "arguments": WHOLE}]), [("find", WHOLE)]),
        # Several at once.
        (
            MINIMAX,
            '<invoke name="find"></invoke><invoke name="go"></invoke>',
            [("find", {}), ("go", {})],
        ),
        (DEEPSEEK, f"{DS[0]}a{DS[1]}{{}}{DS[2]}{DS[0]}b{DS[1]}{{}}{DS[2]}", [("a", {}), ("b", {})]),
        (LFM2, "[a(), b(c=None)]", [("a", {}), ("b", {"c": None})]),
        # What a tool declares otherwise, or does not declare, and is no JSON stays text.
        (HERMES, "<function=find><parameter=most>many</parameter>", [("find", {"most": "many"})]),
        (HERMES, "<function=find><parameter=note>null", [("find", {"note": "null"})]),
        (HERMES, "<function=go><parameter=to>5</parameter>", [("go", {"to": "5"})]),
        (HERMES, "find", [("find", {})]),
        # Lines of a value stay, but for those of its tags.
        (
            HERMES,
            "<function=find><parameter=text>\n\n a\n b \n\n</parameter></function>",
            [("find", {"text": "\n a\n b \n"})],
        ),
        (HERMES, "go", []),
        (HERMES, "<arg_key>a</arg_key><arg_value>b</arg_value>", []),
        (HERMES, "go<arg_key>a</arg_key>", []),
        (HERMES, "<function=>", []),
        (MINIMAX, "find", []),
        (MINIMAX, '<invoke name="find">', []),
        (DEEPSEEK, "find", []),
        (DEEPSEEK, f"{DS[0]}find{DS[2]}", []),
        (DEEPSEEK, f"{DS[0]}find{DS[1]}[1]{DS[2]}", []),
        (DEEPSEEK, f"{DS[0]}{DS[1]}{{}}{DS[2]}", []),
        (LFM2, "[]", []),
        (LFM2, "[find('5')]", []),
        (LFM2, "[find(text=open('a'))]", []),
        (LFM2, "[a.b(c=1)]", []),
        (LFM2, "[find(**{'a': 1})]", [("find", {})]),
        (LFM2, "[find(a=1e999)]", []),
        (LFM2, "(" * 1000, []),
        (LFM2, "[find(text='" + "a" * MOST_PYTHON + "')]", []),
        (LFM2, "import os", []),
    ],
)
def test_calls(syntax: CallSyntax, inside: str, calls: list[tuple[str, Any]]) -> None:
    found = calls_in(syntax, inside, TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_special_tokens_within_calls_belong_to_them() -> None:
    parser = CallParser(DEEPSEEK, TOOLS)
    end = "<\uff5cend▁of▁sentence\uff5c>"
    pieces = [
        TextPiece("Yes.", ((4, DEEPSEEK.begin), (4, DS[0]))),
        TextPiece("find", ((4, DS[1]),)),
        TextPiece('{"most": 1}', ((0, end), (11, DS[2]), (11, DEEPSEEK.end), (11, end))),
    ]
    parts = [*(parse_piece(parser, piece) for piece in pieces), parser.finish()]
    whole = join_parts(parts)
    assert whole.text == "Yes."
    assert [(call.name, call.arguments) for call in whole.calls] == [("find", '{"most": 1}')]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", AnswerForm(syntax=HERMES)),
        (
            "<think>{{ x }}</think><tool_call><function=",
            AnswerForm(thinks=True, syntax=HERMES, call_style="tags"),
        ),
        ("<tool_call><arg_key>", AnswerForm(syntax=HERMES, call_style="glm")),
        ("<minimax:tool_call><invoke> or <tool_call>", AnswerForm(syntax=MINIMAX)),
        (
            "<\uff5ctool▁calls▁begin\uff5c></think>",
            AnswerForm(thinks=True, syntax=DEEPSEEK),
        ),
        ("<|tool_call_start|>", AnswerForm(syntax=LFM2)),
        ("<|channel|>analysis<|message|>", AnswerForm(is_harmony=True)),
        ("[TOOL_CALLS]", AnswerForm()),
        ("", AnswerForm()),
    ],
)
def test_forms_are_found_in_templates(template: str, form: AnswerForm) -> None:
    assert AnswerForm.of(template) == form
