"""Syntaxes in which models call tools, by the marks around a call.

Of Hermes and Qwen3, as JSON; between the same marks Qwen3-Coder and Qwen3.5, and GLM:

    <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>
    <tool_call><function=weather><parameter=place>Oslo</parameter></function></tool_call>
    <tool_call>weather<arg_key>place</arg_key><arg_value>Oslo</arg_value></tool_call>

Others have marks of their own. The models' published templates show them, and
https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4 those of Gemma 4.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from speq.text import call_grammar
from speq.text.call_grammar import WriteCalls, all_in_marks, each_in_marks
from speq.text.open_calls import open_object

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

    name        of the form
    begin, end  marks around calls; an empty end: they go on to the end of the answer
    in_template what a template that asks for this syntax has in it, all of them
    write       writes the grammar of calls
    begun       finds the calls of a text that ends anywhere between the marks, each with the
                arguments that are complete; None: nothing is certain before the end
    inner       special tokens between the marks that belong to the calls
    """

    name: str
    begin: str
    end: str
    parse: Parse
    in_template: tuple[str, ...]
    write: WriteCalls
    begun: Parse | None = None
    inner: frozenset[str] = frozenset()


def calls_in(parse: Parse, text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """The calls between two marks: names, and arguments as JSON. None where one of them is no
    call.
    """
    try:
        called = parse(text, tools)
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


def usual_begun(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """What is certain of `usual_calls`; a list of calls only as a whole."""
    if "<function=" in text:
        return tagged_begun(text, FUNCTION_BEGIN, WHOLE_PARAMETER, tools)
    name, key, _ = text.partition("<arg_key>")
    if key:
        return [(checked_name(name.strip()), typed(name.strip(), GLM_PAIR.findall(text), tools))]
    members, key_of_open, at = open_object(text)
    if key_of_open not in ("arguments", "parameters"):
        return [(name_of(members), arguments_of(members))] if "arguments" in members else []
    return [(name_of(members), open_object(text, at)[0])]


def json_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """One of them, or a list."""
    given = strict_json(text)
    listed = given if isinstance(given, list) else [given]
    return [(name_of(each), arguments_of(each)) for each in listed]


GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm_call(text: str, tools: Sequence[Tool]) -> NamedCall:
    name, _, rest = text.partition("<arg_key>")
    pairs = GLM_PAIR.findall(text)
    if not name.strip() or (rest and not pairs):
        raise ValueError("a call has a name, and arguments values")
    return name.strip(), typed(name.strip(), pairs, tools)


FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
FUNCTION_BEGIN = re.compile(r"<function=([^>\s]+)>")
WHOLE_PARAMETER = re.compile(
    r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>))", re.DOTALL
)
INVOKE_BEGIN = re.compile(r'<invoke name="?([^">]+)"?>')
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


def tagged_begun(
    text: str, begin: re.Pattern[str], parameter: re.Pattern[str], tools: Sequence[Tool]
) -> list[NamedCall]:
    """Find what `tagged_calls` will, with the arguments whose tags are closed."""
    _, *parts = begin.split(text)
    return [
        (name, typed(name, parameter.findall(inside), tools))
        for name, inside in zip(parts[::2], parts[1::2], strict=True)
    ]


def minimax_begun(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    return tagged_begun(text, INVOKE_BEGIN, NAMED_PARAMETER, tools)


def minimax_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    return [*tagged_calls(text, INVOKE, NAMED_PARAMETER, tools)]


# Their bars are full-width ones.
DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP = (
    DEEPSEEK.format(name) for name in ("call▁begin", "call▁end", "sep")
)


def deepseek_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """V3.1 writes a name and arguments, V3 a kind, a name and arguments in a block of code."""
    found = marked_calls(text, DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END)
    return [named_arguments(*unfenced(*each)) for each in found]


def deepseek_begun(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    found = marked_begun(text, DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END)
    return begun_arguments([unfenced(*each) for each in found])


def unfenced(name: str, arguments: str) -> tuple[str, str]:
    """The name and arguments of a call whose kind may stand in the name's place."""
    if name != "function":
        return name, arguments
    name, _, arguments = arguments.partition("\n")
    return name, arguments.strip().removeprefix("```json").removesuffix("```")


KIMI = "<|tool_call_{}|>"
KIMI_BEGIN, KIMI_ARGUMENT, KIMI_END = (
    KIMI.format(name) for name in ("begin", "argument_begin", "end")
)


def kimi_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """A name stands in functions.NAME:NUMBER."""
    found = marked_calls(text, KIMI_BEGIN, KIMI_ARGUMENT, KIMI_END)
    return [named_arguments(kimi_name(name), arguments) for name, arguments in found]


def kimi_begun(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    found = marked_begun(text, KIMI_BEGIN, KIMI_ARGUMENT, KIMI_END)
    return begun_arguments([(kimi_name(name), arguments) for name, arguments in found])


def kimi_name(name: str) -> str:
    return name.removeprefix("functions.").partition(":")[0]


MISTRAL, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """A list of JSON, or from 2025 on a name and arguments for each call, which may have an id."""
    if text.lstrip().startswith(("[{", "{")):
        return json_calls(text, tools)
    found = marked_calls(MISTRAL + text, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL)
    return [named_arguments(name.partition(MISTRAL_ID)[0], arguments) for name, arguments in found]


def mistral_begun(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    found = marked_begun(MISTRAL + text, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL)
    return begun_arguments([(name.partition(MISTRAL_ID)[0], rest) for name, rest in found])


def begun_arguments(found: Sequence[tuple[str, str]]) -> list[NamedCall]:
    """Calls by names and what is there of their arguments; without any of it there is no call."""
    return [
        (checked_name(name.strip()), open_object(arguments)[0])
        for name, arguments in found
        if arguments.strip()
    ]


def marked_begun(text: str, begin: str, separator: str, end: str) -> list[tuple[str, str]]:
    """Find what `marked_calls` will; a name whose separator has not come is left out."""
    parts = [each.partition(end)[0].partition(separator) for each in text.split(begin)[1:]]
    return [(name.strip(), arguments) for name, mark, arguments in parts if mark]


def marked_calls(text: str, begin: str, separator: str, end: str) -> list[tuple[str, str]]:
    """What stands before and behind the separator of each call. Raises ValueError where there is
    none.
    """
    calls = []
    for each in text.split(begin)[1:]:
        name, mark, arguments = each.partition(end)[0].partition(separator)
        if not mark:
            raise ValueError("a call has a name and arguments")
        calls.append((name.strip(), arguments))
    if not calls:
        raise ValueError("there is no call")
    return calls


def named_arguments(name: str, arguments: str) -> NamedCall:
    return checked_name(name.strip()), arguments_of({"arguments": arguments})


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
        pairs = [(pair.arg, JsonNames().visit(pair.value)) for pair in each.keywords if pair.arg]
        calls.append((each.func.id, {name: ast.literal_eval(value) for name, value in pairs}))
    if not calls:
        raise ValueError("there is no call")
    return calls


class JsonNames(ast.NodeTransformer):
    """Reads the names of JSON's constants as these."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


GEMMA_QUOTE = '<|"|>'
GEMMA_SCALAR = re.compile(r"[^,\]}]*")


def gemma_calls(text: str, tools: Sequence[Tool]) -> list[NamedCall]:
    """call:name{argument:value,...}, with marks around texts."""
    name, brace, _ = text.partition("{")
    if not name.strip().startswith("call:") or not brace:
        raise ValueError("a call has a name and arguments")
    arguments, at = gemma_object(text, len(name))
    if text[at:].strip():
        raise ValueError("something follows the arguments")
    return [(checked_name(name.strip().removeprefix("call:")), arguments)]


def gemma_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The object that begins at a brace, and the place behind it."""
    made: dict[str, Any] = {}
    at = behind_space(text, at + 1)
    while text[at : at + 1] != "}":
        colon = text.index(":", at)
        key = text[at:colon].strip().removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)
        made[key], at = gemma_value(text, behind_space(text, colon + 1))
        at = behind_comma(text, at, "}")
    return made, at + 1


def gemma_list(text: str, at: int) -> tuple[list[Any], int]:
    made = []
    at = behind_space(text, at + 1)
    while text[at : at + 1] != "]":
        value, at = gemma_value(text, at)
        made.append(value)
        at = behind_comma(text, at, "]")
    return made, at + 1


def gemma_value(text: str, at: int) -> tuple[Any, int]:
    if text.startswith(GEMMA_QUOTE, at):
        begin = at + len(GEMMA_QUOTE)
        end = text.index(GEMMA_QUOTE, begin)
        return text[begin:end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] == "{":
        return gemma_object(text, at)
    if text[at : at + 1] == "[":
        return gemma_list(text, at)
    found = GEMMA_SCALAR.match(text, at)
    end = at if found is None else found.end()
    return json_or_text(text[at:end].strip()), end


def behind_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def behind_comma(text: str, at: int, closing: str) -> int:
    """The place of the next value, or of the closing mark. Raises ValueError where neither is."""
    at = behind_space(text, at)
    if text[at : at + 1] == ",":
        return behind_space(text, at + 1)
    if text[at : at + 1] != closing:
        raise ValueError(f"neither a comma nor {closing} follows a value")
    return at


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


TOOL_CALL = "<tool_call>", "</tool_call>"
MINIMAX = "<minimax:tool_call>", "</minimax:tool_call>"
DEEPSEEK_CALLS = DEEPSEEK.format("calls▁begin"), DEEPSEEK.format("calls▁end")
DEEPSEEK_INNER = DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END
KIMI_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_INNER = KIMI_BEGIN, KIMI_ARGUMENT, KIMI_END
LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
GEMMA = "<|tool_call>", "<tool_call|>"
HUNYUAN = "<tool_calls>", "</tool_calls>"
IN_BRACKETS = {"opening": "[", "between": ",", "closing": "]"}
# The first one that a template asks for counts: those of one family, whose template may speak of
# others, and those with more marks come first.
SYNTAXES = (
    CallSyntax(
        *("minimax", *MINIMAX, minimax_calls, MINIMAX[:1]),
        all_in_marks(*MINIMAX, call_grammar.invoked_call),
        minimax_begun,
    ),
    CallSyntax(
        *("deepseek-v3", *DEEPSEEK_CALLS, deepseek_calls, (DEEPSEEK_CALLS[0], "```json")),
        all_in_marks(*DEEPSEEK_CALLS, call_grammar.fenced_call(*DEEPSEEK_INNER)),
        deepseek_begun,
        frozenset(DEEPSEEK_INNER),
    ),
    CallSyntax(
        *("deepseek", *DEEPSEEK_CALLS, deepseek_calls, DEEPSEEK_CALLS[:1]),
        all_in_marks(*DEEPSEEK_CALLS, call_grammar.named_call(*DEEPSEEK_INNER)),
        deepseek_begun,
        frozenset(DEEPSEEK_INNER),
    ),
    CallSyntax(
        *("kimi", *KIMI_CALLS, kimi_calls, KIMI_CALLS[:1]),
        all_in_marks(*KIMI_CALLS, call_grammar.named_call(*KIMI_INNER, "functions.{}:#")),
        kimi_begun,
        frozenset(KIMI_INNER),
    ),
    CallSyntax(
        *("lfm2", *LFM2, lfm2_calls, LFM2[:1]),
        all_in_marks(*LFM2, call_grammar.python_call, **IN_BRACKETS),
    ),
    CallSyntax(
        *("gemma", *GEMMA, gemma_calls, GEMMA[:1]),
        each_in_marks(*GEMMA, call_grammar.gemma_call),
        None,
        frozenset({GEMMA_QUOTE}),
    ),
    CallSyntax(
        *("mistral", MISTRAL, "", mistral_calls, (MISTRAL, MISTRAL_ARGUMENTS)),
        each_in_marks(MISTRAL, "", call_grammar.named_call("", MISTRAL_ARGUMENTS, "")),
        mistral_begun,
        frozenset({MISTRAL, MISTRAL_ID, MISTRAL_ARGUMENTS}),
    ),
    CallSyntax(
        *("mistral-json", MISTRAL, "", mistral_calls, (MISTRAL,)),
        all_in_marks(MISTRAL, "", call_grammar.json_call, **IN_BRACKETS),
        None,
        frozenset({MISTRAL, MISTRAL_ID, MISTRAL_ARGUMENTS}),
    ),
    CallSyntax(
        *("hunyuan", *HUNYUAN, json_calls, HUNYUAN[:1]),
        all_in_marks(*HUNYUAN, call_grammar.json_call, **IN_BRACKETS),
    ),
    CallSyntax(
        *("qwen-coder", *TOOL_CALL, usual_calls, (TOOL_CALL[0], "<function=")),
        each_in_marks(*TOOL_CALL, call_grammar.tagged_call),
        usual_begun,
    ),
    CallSyntax(
        *("glm", *TOOL_CALL, usual_calls, (TOOL_CALL[0], "<arg_key>")),
        each_in_marks(*TOOL_CALL, call_grammar.glm_call),
        usual_begun,
    ),
    CallSyntax(
        *("hermes", *TOOL_CALL, usual_calls, TOOL_CALL[:1]),
        each_in_marks(*TOOL_CALL, call_grammar.json_call),
        usual_begun,
    ),
)
HERMES = SYNTAXES[-1]
