"""A model's chat template, and the form in which it takes messages.

The form is found by rendering small chats with marker words once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from speq.errors import OptionError, UnsupportedError
from speq.text.answer_form import AnswerForm
from speq.text.call_syntax import SYNTAXES
from speq.text.render_process import RENDERER, RenderError

# Marker words that no template contains.
NAME, KEY, VALUE, FIRST, SECOND = "qzname", "qzkey", "qzvalue", "qzfirst", "qzsecond"
USER = {"role": "user", "content": "qzuser"}
RESULT = {"role": "tool", "name": NAME, "tool_call_id": "qzid00001", "content": "qzresult"}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "qzdescription",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}, "required": []},
    },
}
CALLED = {"role": "assistant", "content": None}
CALL = {"id": "qzid00001", "type": "function"}


class TemplateRefused(OptionError):
    """A template refused messages, or failed at them."""

    code = "template_refused"


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of messages with tool calls that a template takes.

    null     missing content is None; otherwise an empty string
    as_text  arguments are a JSON string; otherwise an object
    """

    null: bool
    as_text: bool

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        made = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        if made.get("content") is None:
            made["content"] = None if self.null else ""
        return made

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.as_text and isinstance(arguments, str):
            arguments = object_of(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


# The first form that a template renders completely is used.
CALL_FORMS = tuple(CallForm(null, as_text) for as_text in (False, True) for null in (True, False))
# Form for a template that renders no calls.
USUAL = CallForm(null=False, as_text=False)


@dataclass
class ChatTemplate:
    """A chat template.

    text       Jinja source
    variables  its names for special tokens
    syntax     of calls of tools, by its name in `speq.text.call_syntax`; auto: the one it shows
    form       of the answers that it asks for
    """

    text: str
    variables: dict[str, Any]
    syntax: str = "auto"
    form: AnswerForm = field(init=False)
    _takes_parts: dict[str, bool] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat up to where an answer begins.

        variables  further ones, such as enable_thinking; a template ignores what it does not know

        Messages are in the format of OpenAI's API. A list of parts is joined by line feeds if the
        template takes only strings. Raises SpeqError for messages that the template refuses, and
        for tools and calls that it would not render.
        """
        if tools and not self.takes_tools:
            raise UnsupportedError(
                "tools are given and the model's chat template has no place for them"
            )
        try:
            return self._render([self._message(message) for message in messages], tools, variables)
        except RenderError as error:
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {error}"
            ) from error

    def __post_init__(self) -> None:
        self.form = AnswerForm.of(self.text)
        for each in SYNTAXES:
            if each.name == self.syntax:
                self.form = replace(self.form, is_harmony=False, syntax=each)

    @cached_property
    def takes_tools(self) -> bool:
        """True if it renders the list of tools."""
        return NAME in self._try_render([USER], [TOOL])

    @cached_property
    def calls(self) -> CallForm | None:
        """Form of tool calls that it takes; None if it drops them."""
        written = {
            form: self._try_render([USER, form.message(call_example()), RESULT])
            for form in CALL_FORMS
        }
        for form, text in written.items():
            # A template may render values that are not strings as Python does.
            texts = text, written[CallForm(null=False, as_text=form.as_text)]
            pythonic = texts[0].count("None") > texts[1].count("None") and bool(texts[1])
            if is_call(text) and not pythonic:
                return form
        return None if any(written.values()) else USUAL

    def takes_parts(self, role: str) -> bool:
        """True if it renders contents of a role that are lists of parts."""
        if role not in self._takes_parts:
            parts = [{"type": "text", "text": text} for text in (FIRST, SECOND)]
            message = {"role": role, "content": parts}
            before = {"user": [], "system": []}.get(role, [USER])
            if role == "tool":
                before = [USER, (self.calls or USUAL).message(call_example())]
                message = RESULT | message
            behind = [] if role in ("user", "tool") else [USER]
            text = self._try_render([*before, message, *behind])
            whole = FIRST in text and SECOND in text
            self._takes_parts[role] = whole and "'type'" not in text and '"type"' not in text
        return self._takes_parts[role]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        made = {key: value for key, value in message.items() if value is not None}
        if made.get("tool_calls"):
            if self.calls is None:
                raise OptionError(
                    "messages hold calls of tools, which the model's chat template drops"
                )
            made = self.calls.message(made)
        content = made.get("content")
        if isinstance(content, list) and not self.takes_parts(str(made.get("role"))):
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            if None not in texts:
                made["content"] = "\n".join(map(str, texts))
        return made

    def _try_render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Render messages; empty if the template refuses them."""
        try:
            return self._render(messages, tools or [])
        except RenderError:
            return ""

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        given = {**self.variables, **(variables or {})}
        return RENDERER.render(self.text, messages, tools or None, given)


def call_example() -> dict[str, Any]:
    function = {"name": NAME, "arguments": json.dumps({KEY: VALUE})}
    return CALLED | {"tool_calls": [CALL | {"function": function}]}


def is_call(text: str) -> bool:
    """True if a text has the call's arguments, neither in Python syntax nor quoted twice."""
    whole = KEY in text and VALUE in text
    return whole and f"'{KEY}'" not in text and f'\\"{KEY}\\"' not in text


def object_of(text: str) -> Any:
    """Parse a text as JSON; return the text if it is not JSON."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
