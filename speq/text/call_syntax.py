"""Syntaxes in which models call tools, by the marks around a call.

Of Hermes and Qwen3, as JSON; between the same marks Qwen3-Coder and Qwen3.5, and GLM:

    <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>
    <tool_call><function=weather><parameter=place>Oslo</parameter></function></tool_call>
    <tool_call>weather<arg_key>place</arg_key><arg_value>Oslo</arg_value></tool_call>

Others have marks of their own. The models' published templates show them.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# A tool as templates have it: {"type": "function", "function": {"name", "parameters", ...}}.
Tool = Mapping[str, Any]
# A tool's name and the arguments of a call.
NamedCall = tuple[str, dict[str, Any]]
# Finds the calls between two marks. Raises ValueError where there are none.
Parse = Callable[[str, Sequence[Tool]], list[NamedCall]]
# Letters of any script stay, and what JSON has not is refused.
AS_IT_IS: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
# A longer list of calls in Python's syntax is none: parsing one takes much memory.
MOST_PYTHON = 1 << 16


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family calls tools.

    begin, end  marks around calls
    inner       special tokens between them that belong to the calls
    in_template what a template that asks for this syntax has in it
    """

    begin: str
    end: str
    parse: Parse
    in_template: str
    inner: frozenset[str] = frozenset()


def calls_in(syntax: CallSyntax, text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """The calls between two marks: names, and arguments as JSON. None where one of them is no
    call.
    """
    try:
        called = syntax.parse(text, tools)
        made = [(name, json.dumps(arguments, **AS_IT_IS)) for name, arguments in called]
        for name, arguments in made:
            (name + arguments).encode()  # half a character is none
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return made


def usual_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """Between <tool_call> and </tool_call>: as JSON, as Qwen3-Coder has them, or GLM."""
    if "<function=" in text:
        return [*tagged_calls(text, FUNCTION, PARAMETER, tools)]
    if "<arg_key>" in text or text.strip() in {name_of(tool["function"]) for tool in tools}:
        return [glm_call(text, tools)]
    return json_calls(text, tools)


def json_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """One of them, or a list."""
    given = strict_json(text)
    listed = given if isinstance(given, list) else [given]
    return [(name_of(each), arguments_of(each)) for each in listed]


def glm_call(text: str, tools: Sequence[Tool]) -> NamedCall:
    name, _, rest = text.partition("<arg_key>")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    if not name.strip() or (rest and not pairs):
        raise ValueError("a call has a name, and arguments values")
    return name.strip(), typed(name.strip(), pairs, tools)


FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
INVOKE = re.compile(r'<invoke name="?([^">]+)"?>(.*?)</invoke>', re.DOTALL)
NAMED_PARAMETER = re.compile(r'<parameter name="?([^">]+)"?>(.*?)</parameter>', re.DOTALL)


def tagged_calls(
    text: str, call: re.Pattern[str], parameter: re.Pattern[str], tools: Sequence[Tool]
) -> Iterator[NamedCall]:
    """Calls as tags, with a tag for each argument. Raises ValueError where there are none."""
    found = call.findall(text)
    if not found:
        raise ValueError("there is no call")
    for name, inside in found:
        yield name, typed(name, parameter.findall(inside), tools)


def minimax_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    return [*tagged_calls(text, INVOKE, NAMED_PARAMETER, tools)]


# Their bars are full-width ones.
DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP = (
    DEEPSEEK.format(name) for name in ("call▁begin", "call▁end", "sep")
)


def deepseek_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """V3.1 writes a name and arguments, V3 a kind, a name and arguments in a block of code."""
    calls = []
    for each in text.split(DEEPSEEK_BEGIN)[1:]:
        name, mark, arguments = each.partition(DEEPSEEK_END)[0].partition(DEEPSEEK_SEP)
        if not mark:
            raise ValueError("a call has a name and arguments")
        if name.strip() == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append((checked_name(name.strip()), arguments_of({"arguments": arguments})))
    if not calls:
        raise ValueError("there is no call")
    return calls


def lfm2_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """Calls in Python's syntax, in a list: [weather(place="Oslo")]; or as JSON."""
    if text.lstrip().startswith(("{", "[{")):
        return json_calls(text, tools)
    if len(text) > MOST_PYTHON:
        raise ValueError("the calls are too long")
    listed = ast.parse(text.strip(), mode="eval").body
    calls = []
    for each in listed.elts if isinstance(listed, ast.List) else [listed]:
        if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Name) or each.args:
            raise ValueError("a call has a name, and arguments names")
        named = {str(pair.arg): ast.literal_eval(pair.value) for pair in each.keywords if pair.arg}
        calls.append((each.func.id, named))
    if not calls:
        raise ValueError("there is no call")
    return calls


def typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> dict[str, Any]:
    """Arguments of texts: those that the tool declares as other types than texts are read as JSON,
    where they are.
    """
    declared = properties_of(name, tools)
    made: dict[str, Any] = {}
    for key, text in pairs:
        value = text.removeprefix("\n").removesuffix("\n")
        schema = declared.get(key.strip())
        kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
        made[key.strip()] = value if "string" in kind else json_or_text(value)
    return made


def json_or_text(text: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return text


def properties_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    """What a tool declares of its arguments; nothing of one that is not known."""
    for tool in tools:
        function = tool["function"]
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def strict_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, NaN and Infinity among it."""
    return json.loads(text, parse_constant=refuse)


def refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def name_of(given: Any) -> str:
    """The name of what is called. Raises ValueError where there is none."""
    return checked_name(given.get("name") if isinstance(given, dict) else None)


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    return name


def arguments_of(given: dict[str, Any]) -> dict[str, Any]:
    """Under either of two names, as an object or as a text that holds one. A call without them has
    none. Raises ValueError where they may be under a name that is not known.
    """
    known = [given[name] for name in ("arguments", "parameters") if name in given]
    if not known and given.keys() - {"name", "id", "type"}:
        raise ValueError("arguments are missing")
    arguments = known[0] if known else None
    if isinstance(arguments, str):
        arguments = strict_json(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return arguments


HERMES = CallSyntax("<tool_call>", "</tool_call>", usual_calls, "<tool_call>")
# The marks of a family of its own come first: its template may speak of others.
SYNTAXES = (
    CallSyntax("<minimax:tool_call>", "</minimax:tool_call>", minimax_calls, "<minimax:tool_call>"),
    CallSyntax(
        DEEPSEEK.format("calls▁begin"),
        DEEPSEEK.format("calls▁end"),
        deepseek_calls,
        DEEPSEEK.format("calls▁begin"),
        frozenset({DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP}),
    ),
    CallSyntax("<|tool_call_start|>", "<|tool_call_end|>", lfm2_calls, "<|tool_call_start|>"),
    HERMES,
)
