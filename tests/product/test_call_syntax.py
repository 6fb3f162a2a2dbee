"""Calls of tools as families write them, between their marks."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from speq.config import TOOL_SYNTAXES
from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import AnswerParser, join_parts, parse_piece
from speq.text.call_syntax import MOST_PYTHON, SYNTAXES, CallSyntax, calls_in
from speq.text.chat_template import ChatTemplate
from speq.text.stream import TextPiece
from speq.text.thoughts import THINK, THOUGHTS
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
BY_NAME = {each.name: each for each in SYNTAXES}
MINIMAX, DEEPSEEK, LFM2, HERMES, KIMI, GEMMA, MISTRAL, HUNYUAN = (
    BY_NAME[name]
    for name in ("minimax", "deepseek", "lfm2", "hermes", "kimi", "gemma", "mistral", "hunyuan")
)
QUOTE = '<|"|>'
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
        (
            LFM2,
            "[find(text='5', most=5, where=['a', {'b': 1}], on=true, off=null)]",
            [("find", {**WHOLE, "on": True, "off": None})],
        ),
        (
            KIMI,
            "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
            f"{json.dumps(WHOLE)}<|tool_call_end|>",
            [("find", WHOLE)],
        ),
        (
            GEMMA,
            f"call:find{{text:{QUOTE}5{QUOTE},most:5,where:[{QUOTE}a{QUOTE},{{b:1}}]}}",
            [("find", WHOLE)],
        ),
        (
            GEMMA,
            f"call:find{{ text: {QUOTE}a, }}{QUOTE} , {QUOTE}deep{QUOTE}:{{a:{{}},b:[]}},on:true}}",
            [("find", {"text": "a, }", "deep": {"a": {}, "b": []}, "on": True})],
        ),
        (GEMMA, "call:go{}", [("go", {})]),
        (GEMMA, "call:go{a:1 b:2}", [("go", {"a": "1 b:2"})]),
        (MISTRAL, f"find[ARGS]{json.dumps(WHOLE)}", [("find", WHOLE)]),
        (MISTRAL, f" {json.dumps([{'name': 'find', 'arguments': WHOLE}])}", [("find", WHOLE)]),
        (
            HUNYUAN,
            f"\n{json.dumps([{'name': 'find', 'arguments': WHOLE}])}\n",
            [("find", WHOLE)],
        ),
        # Several at once.
        (MISTRAL, "a[ARGS]{}[TOOL_CALLS]b[CALL_ID]x1[ARGS]{}", [("a", {}), ("b", {})]),
        (
            KIMI,
            "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>b<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("a", {}), ("b", {})],
        ),
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
        *((KIMI, text, []) for text in ("find", "<|tool_call_begin|>find<|tool_call_end|>")),
        *((MISTRAL, text, []) for text in ("find", "find{}", "[ARGS]{}", "find[ARGS]no")),
        *((HUNYUAN, text, []) for text in ("", "find", "[{}]")),
        *(
            (GEMMA, text, [])
            for text in (
                *("go", "go{}", "call:{}", "call:go", "call:go{", "call:go{a}", "call:go{a:1"),
                *("call:go{a:[1}", "call:go{}x", f"call:go{{a:{QUOTE}b}}"),
                "call:go{a:" + "[" * 100_000,
            )
        ),
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
    found = calls_in(syntax.parse, inside, TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    if calls:  # piece by piece they are the same
        text = [TextPiece(each) for each in syntax.begin + inside + syntax.end]
        assert told_of(CallParser(syntax, TOOLS), text) == ("", found)


KIMI_MARKS = [f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")]


@pytest.mark.parametrize(
    ("syntax", "first", "second", "rest"),
    [
        (
            HERMES,
            '{"name": "find", "arguments": {"text": "5",',
            '"most": 1}',
            "}",
        ),
        (
            HERMES,
            "<function=find><parameter=text>5</parameter>",
            "<parameter=most>1</parameter>",
            "</function>",
        ),
        (
            HERMES,
            "find<arg_key>text</arg_key><arg_value>5</arg_value>",
            "<arg_key>most</arg_key><arg_value>1</arg_value>",
            "",
        ),
        (
            MINIMAX,
            '<invoke name="find"><parameter name="text">5</parameter>',
            '<parameter name="most">1</parameter>',
            "</invoke>",
        ),
        (DEEPSEEK, f'{DS[0]}find{DS[1]}{{"text": "5",', '"most": 1}', DS[2]),
        (
            BY_NAME["deepseek-v3"],
            f'{DS[0]}function{DS[1]}find\n```json\n{{"text": "5",',
            '"most": 1}',
            f"\n```{DS[2]}",
        ),
        (
            KIMI,
            f'{KIMI_MARKS[0]}functions.find:0{KIMI_MARKS[1]}{{"text": "5",',
            '"most": 1}',
            KIMI_MARKS[2],
        ),
        (MISTRAL, 'find[ARGS]{"text": "5",', '"most": 1}', ""),
    ],
)
def test_arguments_are_told_one_by_one(
    syntax: CallSyntax, first: str, second: str, rest: str
) -> None:
    parser = CallParser(syntax, TOOLS, lambda: "id")
    texts = (f"Yes. {syntax.begin}{first}", second, rest + syntax.end)
    parts = [parser.feed(text) for text in texts] + [parser.finish()]
    pieces = [(call.name, call.arguments, call.ends) for part in parts for call in part.calls]
    assert pieces[:2] == [("find", '{"text": "5"', False), ("find", ', "most": 1', False)]
    assert pieces[2:] == [("find", "}", True)]
    assert "".join(part.text for part in parts) == "Yes."


def test_a_call_that_breaks_ends_with_what_was_told() -> None:
    for behind in ("oops}}</tool_call> So.", "", '"text": "again"}}</tool_call> So.'):
        text = f'<tool_call>{{"name": "find", "arguments": {{"text": "5", {behind}'
        said, calls = told_of(CallParser(HERMES, TOOLS), [TextPiece(each) for each in text])
        assert calls == [("find", '{"text": "5"}')]
        assert said == ("So." if behind else "")


def test_a_call_that_is_named_alone_has_no_arguments() -> None:
    text = '<tool_call>{"name": "find", "arguments": {"text": 5'
    said, calls = told_of(CallParser(HERMES, TOOLS), [TextPiece(each) for each in text])
    assert (said, calls) == ("", [("find", "{}")])


def test_special_tokens_within_calls_belong_to_them() -> None:
    parser = CallParser(DEEPSEEK, TOOLS)
    end = "<\uff5cend▁of▁sentence\uff5c>"
    pieces = [
        TextPiece("Yes.", ((4, DEEPSEEK.begin), (4, DS[0]))),
        TextPiece("find", ((4, DS[1]),)),
        TextPiece('{"most": 1}', ((0, end), (11, DS[2]), (11, DEEPSEEK.end), (11, end))),
    ]
    assert told_of(parser, pieces) == ("Yes.", [("find", '{"most": 1}')])


def told_of(parser: AnswerParser, pieces: Sequence[TextPiece]) -> tuple[str, list[tuple[str, str]]]:
    parts = [*(parse_piece(parser, piece) for piece in pieces), parser.finish()]
    whole = join_parts(parts)
    return whole.text, [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize("marked", [True, False])
def test_calls_that_the_answer_ends(marked: bool) -> None:
    """Mistral's, whose marks are special tokens or text."""
    begin, arguments = "[TOOL_CALLS]", "[ARGS]"
    pieces = [
        TextPiece("Yes.\n", ((5, begin),)),
        TextPiece("find", ((4, arguments),)),
        TextPiece('{"most": 1}', ((11, begin),)),
        TextPiece("go", ((2, arguments),)),
        TextPiece("{}"),
    ]
    if not marked:
        text = f'Yes.\n{begin}find{arguments}{{"most": 1}}{begin}go{arguments}{{}}'
        pieces = [TextPiece(each) for each in text]
    found = told_of(CallParser(MISTRAL, TOOLS), pieces)
    assert found == ("Yes.", [("find", '{"most": 1}'), ("go", "{}")])


def test_texts_of_gemma_hold_any_character() -> None:
    pieces = [
        TextPiece("", ((0, GEMMA.begin),)),
        TextPiece("call:find{text:", ((15, QUOTE),)),
        TextPiece("a}, b:", ((6, QUOTE),)),
        TextPiece("}", ((1, GEMMA.end),)),
    ]
    assert told_of(CallParser(GEMMA, TOOLS), pieces) == ("", [("find", '{"text": "a}, b:"}')])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", AnswerForm(syntax=HERMES)),
        (
            "<think>{{ x }}</think><tool_call><function=",
            AnswerForm(thoughts=THINK, syntax=BY_NAME["qwen-coder"]),
        ),
        ("<tool_call><arg_key>", AnswerForm(syntax=BY_NAME["glm"])),
        ("<minimax:tool_call><invoke> or <tool_call>", AnswerForm(syntax=MINIMAX)),
        (
            "<\uff5ctool▁calls▁begin\uff5c></think>",
            AnswerForm(thoughts=THINK, syntax=DEEPSEEK),
        ),
        (
            "<\uff5ctool▁calls▁begin\uff5c>```json",
            AnswerForm(syntax=BY_NAME["deepseek-v3"]),
        ),
        ("<|tool_call_start|>", AnswerForm(syntax=LFM2)),
        ("<|channel|>analysis<|message|>", AnswerForm(is_harmony=True)),
        ("[TOOL_CALLS]", AnswerForm(syntax=BY_NAME["mistral-json"])),
        ("[TOOL_CALLS][ARGS][/THINK]", AnswerForm(thoughts=THOUGHTS[2], syntax=MISTRAL)),
        ("<|tool_calls_section_begin|>", AnswerForm(syntax=KIMI)),
        ("<|tool_call>call:<|channel>thought<channel|>", AnswerForm(False, THOUGHTS[1], GEMMA)),
        (
            "</think><tool_calls>.split('<answer>') '</answer>'",
            AnswerForm(thoughts=THINK, syntax=HUNYUAN, wrapper="answer"),
        ),
        ("<response>\n</response><tool_call>", AnswerForm(syntax=HERMES, wrapper="response")),
        ("", AnswerForm()),
    ],
)
def test_forms_are_found_in_templates(template: str, form: AnswerForm) -> None:
    assert AnswerForm.of(template) == form


def test_a_form_can_be_named() -> None:
    assert set(TOOL_SYNTAXES) == {"auto", *BY_NAME}
    for text in ("<tool_call>", "<|channel|>analysis<|message|>", ""):
        assert ChatTemplate(text, {}, "kimi").form == AnswerForm(syntax=KIMI)
