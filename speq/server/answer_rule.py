"""What an answer must follow, from the fields of a request to a grammar."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speq.errors import OptionError
from speq.server.fields import ChatBody, NamedTool, SampledBody
from speq.text.call_grammar import ANY_OBJECT, json_rule
from speq.text.grammar import AnswerGrammar, choice_rule, regex_rule

# Writes a grammar of answers, given what writes grammars of one model's.
Write = Callable[[AnswerGrammar], str]
NamedWrite = tuple[str, Write]


def wanted_form(body: SampledBody) -> NamedWrite | None:
    """What an answer must follow: the field that says so, and what writes its grammar; None:
    nothing.

    Raises SpeqError for two of them, and for what cannot be a schema.
    """
    given = [*guided(body)]
    if isinstance(body, ChatBody):
        given += [*response_format(body), *tool_choice(body)]
    if len(given) > 1:
        raise OptionError(f"{given[0][0]} and {given[1][0]} are both given; give one")
    if given and (body.ignore_eos or body.min_tokens):
        name = "ignore_eos" if body.ignore_eos else "min_tokens"
        raise OptionError(f"{name} is given with a form of the answer, which ends it; give one")
    return given[0] if given else None


def guided(body: SampledBody) -> Iterator[NamedWrite]:
    """Forms by vLLM's names, in an object or as fields of their own."""
    for name, write in FORMS.items():
        value = getattr(body, f"guided_{name}", None)
        if value is not None:
            yield f"guided_{name}", write(f"guided_{name}", value)
        # pydantic keeps the name `json` for itself.
        value = getattr(body.structured_outputs, "json_" if name == "json" else name, None)
        if value is not None:
            yield "structured_outputs", write(f"structured_outputs.{name}", value)


def any_object(name: str, value: Any) -> Write:
    return lambda grammar: grammar.text(json_rule(ANY_OBJECT))


def schema(name: str, value: Any) -> Write:
    """value: an object, or a text of one"""
    try:
        made = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        made = None
    if not isinstance(made, dict):
        raise OptionError(f"{name} is {value!r:.80}; give a JSON schema")
    return lambda grammar: grammar.text(json_rule(made))


def regex(name: str, value: str) -> Write:
    return lambda grammar: grammar.text(regex_rule(value))


def choice(name: str, value: list[str]) -> Write:
    return lambda grammar: grammar.text(choice_rule(value))


def own_grammar(name: str, value: str) -> Write:
    """value: of the whole answer, in Lark's syntax"""
    return lambda grammar: value


FORMS: dict[str, Callable[[str, Any], Write]] = {
    "json": schema,
    "json_object": any_object,
    "regex": regex,
    "choice": choice,
    "grammar": own_grammar,
}


def response_format(body: ChatBody) -> Iterator[NamedWrite]:
    format = body.response_format
    if format is None or format.type == "text":
        return
    wanted: dict[str, Any] | None = ANY_OBJECT
    if format.type == "json_schema":
        if format.json_schema is None:
            raise OptionError("response_format has no json_schema; give it")
        wanted = format.json_schema.schema_
    yield "response_format", schema("response_format", ANY_OBJECT if wanted is None else wanted)


def tool_choice(body: ChatBody) -> Iterator[NamedWrite]:
    """Raises SpeqError for a tool that is not given."""
    chosen = body.tool_choice
    if chosen is None or chosen in ("auto", "none"):
        return
    names = [tool.function.name for tool in body.tools or ()]
    if isinstance(chosen, NamedTool) and chosen.function.name not in names:
        raise OptionError(f"tool_choice names {chosen.function.name!r:.80}, which tools have not")
    if not names:
        raise OptionError("tool_choice is 'required' and no tools are given; give some")
    yield "tool_choice", AnswerGrammar.calls


def is_chosen(chosen: Any, tool: Mapping[str, Any]) -> bool:
    """True for the one tool that a request must call."""
    return isinstance(chosen, NamedTool) and tool["function"]["name"] == chosen.function.name
