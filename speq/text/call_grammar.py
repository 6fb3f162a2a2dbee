"""Grammars of calls of tools, in the Lark syntax of llguidance: what writes one for each syntax.

Arguments of a call come in the order in which its tool declares them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# A model may write white space for ever where it may: so much and no more.
SPACE = r"/[ \n\t]{0,4}/"
JSON_SPACE = {"x-guidance": {"whitespace_pattern": r"(\n[ \t]{0,40}|[ ]?)"}}
ANY_TEXT = "/(?s:.*)/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}

# A tool's part of {"type": "function", "function": {"name", "parameters", ...}}.
Function = Mapping[str, Any]
# A mark as a text, or as the special token that it is.
Mark = Callable[[str], str]
WriteCall = Callable[[Function, Mark], str]
# Writes the rule of calls of some functions: of one alone, or of any number.
WriteCalls = Callable[[Sequence[Function], Mark, bool], str]


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Spaces between its values are one, or a line's beginning."""
    bounded = {**JSON_SPACE, **schema} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(bounded)}"


def text_rule(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def up_to_rule(name: str, mark: str) -> str:
    """The rule of a text up to a mark of text, that mark included."""
    return f"{name}[lazy]: /(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}/"


# Texts up to a mark, for the arguments of calls.
UP_TO = (
    up_to_rule("value", "</parameter>"),
    up_to_rule("glm_value", "</arg_value>"),
    up_to_rule("gemma_value", '<|"|>'),
)


def each_in_marks(begin: str, end: str, write: WriteCall) -> WriteCalls:
    """Calls with marks of their own. end: empty where the next call, or the answer's end, is it"""

    def rule(functions: Sequence[Function], mark: Mark, one: bool) -> str:
        call = f"{mark(begin)} {SPACE} {any_of(functions, mark, write)}"
        if end:
            call = f"{call} {SPACE} {mark(end)}"
        return call if one else f"({call} {SPACE})+"

    return rule


def all_in_marks(
    begin: str, end: str, write: WriteCall, opening: str = "", between: str = "", closing: str = ""
) -> WriteCalls:
    """Calls within one pair of marks, and within one pair of brackets, where there are some."""

    def rule(functions: Sequence[Function], mark: Mark, one: bool) -> str:
        call = any_of(functions, mark, write)
        parted = f"{text_rule(between)} {SPACE}" if between else SPACE
        parts = [mark(begin), SPACE, call if one else f"{call} ({parted} {call})*", SPACE]
        if opening:
            parts[1:2] = [SPACE, text_rule(opening)]
            parts[-1:] = [text_rule(closing), SPACE]
        return " ".join([*parts, *([mark(end)] if end else [])])

    return rule


def any_of(functions: Sequence[Function], mark: Mark, write: WriteCall) -> str:
    calls = " | ".join(f"({write(each, mark)})" for each in functions)
    return f"({calls})"


def json_call(function: Function, mark: Mark) -> str:
    begin = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    return f"{text_rule(begin)} {json_rule(parameters_of(function))} {text_rule('}')}"


def tagged_call(function: Function, mark: Mark) -> str:
    """A call of Qwen3-Coder, with a tag for each argument."""
    return in_tags(function, "<function={}>", "<parameter={}>", "</function>")


def invoked_call(function: Function, mark: Mark) -> str:
    """A call of MiniMax."""
    return in_tags(function, '<invoke name="{}">', '<parameter name="{}">', "</invoke>")


def in_tags(function: Function, begin: str, parameter: str, end: str) -> str:
    parts = [text_rule(begin.format(function["name"])), SPACE]
    for name, schema, is_needed in arguments_of(function):
        value = f'"\\n"? {json_rule(schema)} "\\n"? "</parameter>"'
        if is_text(schema):
            value = "value"
        part = f"{text_rule(parameter.format(name))} {value} {SPACE}"
        parts.append(part if is_needed else f"({part})?")
    return " ".join([*parts, text_rule(end)])


def glm_call(function: Function, mark: Mark) -> str:
    parts = [text_rule(function["name"]), SPACE]
    for name, schema, is_needed in arguments_of(function):
        value = "glm_value" if is_text(schema) else f'{json_rule(schema)} "</arg_value>"'
        key = text_rule(f"<arg_key>{name}</arg_key>")
        part = f'{key} {SPACE} "<arg_value>" {value} {SPACE}'
        parts.append(part if is_needed else f"({part})?")
    return " ".join(parts)


def named_call(begin: str, separator: str, end: str, name: str = "{}") -> WriteCall:
    """A name and JSON between marks. name: how it is written, with the number of the call"""

    def rule(function: Function, mark: Mark) -> str:
        called, numbered, _ = name.format(function["name"]).partition("#")
        parts = [mark(begin)] if begin else []
        parts.append(text_rule(called))
        if numbered:
            parts.append("/[0-9]{1,3}/")
        parts += [mark(separator), json_rule(parameters_of(function))]
        return " ".join([*parts, *([mark(end)] if end else [])])

    return rule


def fenced_call(begin: str, separator: str, end: str) -> WriteCall:
    """A call of DeepSeek V3: its kind, its name, and JSON in a block of code."""

    def rule(function: Function, mark: Mark) -> str:
        opening, closing = text_rule(f"{function['name']}\n```json\n"), text_rule("\n```")
        arguments = json_rule(parameters_of(function))
        kind = f'{mark(begin)} "function" {mark(separator)}'
        return f"{kind} {opening} {arguments} {closing} {mark(end)}"

    return rule


def python_call(function: Function, mark: Mark) -> str:
    """A call of LFM2: name(argument=value, ...)."""
    parts = [
        (f"{text_rule(f'{name}=')} {python_value(schema)}", is_needed)
        for name, schema, is_needed in arguments_of(function)
    ]
    begin = text_rule(function["name"] + "(")
    return f"{begin} {parted(parts, ', ')} {text_rule(')')}"


def python_value(schema: Any) -> str:
    if isinstance(schema, Mapping) and schema.get("type") == "boolean":
        return '("True" | "False")'
    return json_rule(schema)


def gemma_call(function: Function, mark: Mark) -> str:
    """A call of Gemma 4: call:name{argument:value,...}, with marks around texts."""
    return f"{text_rule('call:' + function['name'])} {gemma_object(parameters_of(function), mark)}"


def gemma_object(schema: Mapping[str, Any], mark: Mark) -> str:
    parts = [
        (f"{text_rule(f'{name}:')} {gemma_value(inner, mark)}", is_needed)
        for name, inner, is_needed in properties_of(schema)
    ]
    return f"{text_rule('{')} {parted(parts, ',')} {text_rule('}')}"


def gemma_value(schema: Any, mark: Mark) -> str:
    """What is not declared as anything else is a text."""
    declared = schema if isinstance(schema, Mapping) else {}
    quote = mark('<|"|>')
    if isinstance(declared.get("enum"), list):
        values = (
            f"{quote} {text_rule(each)} {quote}" if isinstance(each, str) else json_text(each)
            for each in declared["enum"]
        )
        return f"({' | '.join(values)})"
    kind = declared.get("type")
    if kind == "object":
        return gemma_object(declared, mark)
    if kind == "array":
        item = gemma_value(declared.get("items"), mark)
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind in ("number", "integer", "boolean", "null"):
        return json_rule(declared)
    is_special = not quote.startswith('"')
    return f"{quote} {ANY_TEXT} {quote}" if is_special else f"{quote} gemma_value"


def json_text(value: Any) -> str:
    return text_rule(json.dumps(value))


def parted(parts: Sequence[tuple[str, bool]], comma: str) -> str:
    """Parts in their order, with a comma between two that are there. Each has a rule, and whether
    it must be there.
    """
    ways = []
    for at, (first, is_needed) in enumerate(parts):
        following = (
            f"{text_rule(comma)} {rule}" if needed else f"({text_rule(comma)} {rule})?"
            for rule, needed in parts[at + 1 :]
        )
        ways.append(f"({' '.join([first, *following])})")
        if is_needed:
            return f"({' | '.join(ways)})"
    return f"({' | '.join(ways)})?" if ways else '""'


def parameters_of(function: Function) -> Mapping[str, Any]:
    return function.get("parameters") or ANY_OBJECT


def arguments_of(function: Function) -> Iterator[tuple[str, Any, bool]]:
    """Name and schema of each declared argument, and whether a call must have it."""
    return properties_of(parameters_of(function))


def properties_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The same of an object of any schema."""
    properties, needed = schema.get("properties"), schema.get("required")
    listed = needed if isinstance(needed, list) else []
    if isinstance(properties, Mapping):
        yield from ((name, inner, name in listed) for name, inner in properties.items())


def is_text(schema: Any) -> bool:
    """True for an argument that is any text: what it is between its tags."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema
