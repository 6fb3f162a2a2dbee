"""Grammars of answers, in the Lark syntax of llguidance.

An answer may have a thought before it, which no grammar bounds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speq.errors import UnsupportedError
from speq.text import harmony, thoughts
from speq.text.answer_form import AnswerForm
from speq.text.call_syntax import HERMES, Tool

# A model may write white space for ever where it may: so much and no more.
SPACE = r"/[ \n\t]{0,4}/"
JSON_SPACE = {"x-guidance": {"whitespace_pattern": r"(\n[ \t]{0,40}|[ ]?)"}}
ANY_TEXT = "/(?s:.*)/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Rules of texts up to a mark of text, that mark included.
UP_TO = (
    r"thought[lazy]: /(?s:.*)<\/think>/",
    r"value[lazy]: /(?s:.*)<\/parameter>/",
    r"glm_value[lazy]: /(?s:.*)<\/arg_value>/",
)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Spaces between its values are one, or a line's beginning."""
    bounded = {**JSON_SPACE, **schema} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(bounded)}"


def regex_rule(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/").replace("\n", r"\n") + "/"


def text_rule(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def choice_rule(texts: Sequence[str]) -> str:
    return " | ".join(map(text_rule, texts))


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Writes grammars of one model's answers to one prompt.

    form         of its answers
    is_thinking  the prompt ends within a thought
    special      texts of special tokens, by id
    tools        that an answer may call
    most_calls   of an answer; None: any number
    """

    form: AnswerForm
    is_thinking: bool
    special: Mapping[int, str]
    tools: Sequence[Tool] = ()
    most_calls: int | None = None
    _ids: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ids.update({text: token_id for token_id, text in self.special.items()})

    def text(self, rule: str) -> str:
        """An answer of one rule; or, where there are tools, calls of them in its place."""
        answer = f"({rule})"
        if self.form.is_harmony:
            answer = f"{self._channel('final')} {answer}"
        calls = f" | {self._calls()}" if self.tools else ""
        return self._grammar(f"{answer}{calls}")

    def calls(self) -> str:
        """At least one call of a tool."""
        return self._grammar(self._calls())

    def _grammar(self, answer: str) -> str:
        return "\n".join([f"start: {self._thoughts()}({answer})", *UP_TO])

    def _thoughts(self) -> str:
        """What may come before an answer."""
        if self.form.is_harmony:
            end, start = self._mark("<|end|>"), self._mark(harmony.START)
            thought = f'{self._channel("analysis")} {ANY_TEXT} {end} {start} "assistant"'
            return f"({thought})* "
        if not self.form.thinks:
            return ""
        end = self._mark(thoughts.END)
        thought = "thought" if end.startswith('"') else f"{ANY_TEXT} {end}"
        if self.is_thinking:
            return f"{thought} {SPACE} "
        return f"({SPACE} {self._mark(thoughts.BEGIN)} {thought} {SPACE})? "

    def _calls(self) -> str:
        """Raises SpeqError for a form of calls that has no grammar here."""
        functions = [tool["function"] for tool in self.tools]
        if self.form.is_harmony:
            return " | ".join(f"({self._harmony_call(each)})" for each in functions)
        if self.form.syntax is not HERMES:
            raise UnsupportedError(
                "tool_choice or response_format needs a grammar of the model's calls, which only "
                "those between <tool_call> and </tool_call> have, and gpt-oss's; give tool_choice "
                "auto, and no response_format"
            )
        write = {"json": json_call, "tags": tagged_call, "glm": glm_call}[self.form.call_style]
        calls = " | ".join(f"({write(each)})" for each in functions)
        one = f"{self._mark(HERMES.begin)} {SPACE} ({calls}) {SPACE} {self._mark(HERMES.end)}"
        return one if self.most_calls == 1 else f"({one} {SPACE})+"

    def _harmony_call(self, function: Mapping[str, Any]) -> str:
        begin = self._channel(f"commentary to=functions.{function['name']}")
        return f"{begin} {json_rule(parameters_of(function))}"

    def _channel(self, name: str) -> str:
        """The beginning of a message in a channel of harmony."""
        begin, message = self._mark(harmony.CHANNEL), self._mark(harmony.MESSAGE)
        json_mark = f'(" " {self._mark(harmony.CONSTRAIN)} "json")?'
        return f"{begin} {text_rule(name)} {json_mark} {message}"

    def _mark(self, name: str) -> str:
        """A mark as a text, or as the special token that it is."""
        return f"<[{self._ids[name]}]>" if name in self._ids else text_rule(name)


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or ANY_OBJECT


def json_call(function: Mapping[str, Any]) -> str:
    begin = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    return f"{text_rule(begin)} {json_rule(parameters_of(function))} {text_rule('}')}"


def tagged_call(function: Mapping[str, Any]) -> str:
    """With a tag for each argument, in the order in which they are declared."""
    parts = [text_rule(f"<function={function['name']}>"), SPACE]
    for name, schema, is_needed in arguments_of(function):
        value = f'"\\n"? {json_rule(schema)} "\\n"? "</parameter>"'
        if is_text(schema):
            value = "value"
        part = f"{text_rule(f'<parameter={name}>')} {value} {SPACE}"
        parts.append(part if is_needed else f"({part})?")
    return " ".join([*parts, '"</function>"'])


def glm_call(function: Mapping[str, Any]) -> str:
    parts = [text_rule(function["name"]), SPACE]
    for name, schema, is_needed in arguments_of(function):
        value = "glm_value" if is_text(schema) else f'{json_rule(schema)} "</arg_value>"'
        key = text_rule(f"<arg_key>{name}</arg_key>")
        part = f'{key} {SPACE} "<arg_value>" {value} {SPACE}'
        parts.append(part if is_needed else f"({part})?")
    return " ".join(parts)


def arguments_of(function: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and schema of each declared argument, and whether a call must have it."""
    parameters = parameters_of(function)
    properties, needed = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, Mapping):
        return []
    listed = needed if isinstance(needed, list) else []
    return [(name, schema, name in listed) for name, schema in properties.items()]


def is_text(schema: Any) -> bool:
    """True for an argument that is any text: what it is between its tags."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema
