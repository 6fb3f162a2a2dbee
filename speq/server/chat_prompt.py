"""From the messages of a chat to what the model's template takes."""

import json
from collections.abc import Iterator
from typing import Any

from speq.errors import OptionError
from speq.server.fields import ChatBody, ChatMessage, TextContent, Tool


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them, without what templates do not know.

    Raises SpeqError for arguments that are no object, and for a message without content.
    """
    return [template_message(f"messages[{at}]", each) for at, each in enumerate(messages)]


def template_message(name: str, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if content is None and not message.tool_calls:
        if message.role != "assistant":
            raise OptionError(f"{name}.content is null; give a text")
        content = ""
    made: dict[str, Any] = {
        # OpenAI's newer name of it.
        "role": "system" if message.role == "developer" else message.role,
        "content": content_of(content),
    }
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        for at, call in enumerate(message.tool_calls):
            check_arguments(f"{name}.tool_calls[{at}]", call.function.arguments)
        made["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    thought = message.reasoning_content or message.reasoning
    if thought:
        # Templates have one name of it or the other.
        made |= {"reasoning_content": thought, "thinking": thought}
    return made


def with_one_system(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages, and what to try where a template refuses several system messages, one
    that comes late, or any: one at the beginning, and its text before the first other message.
    """
    yield messages
    said = [str(text_of(each["content"])) for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    if not said or not others:
        return
    system = "\n\n".join(said)
    yield [{"role": "system", "content": system}, *others]
    first = others[0]
    yield [first | {"content": f"{system}\n\n{text_of(first['content'])}"}, *others[1:]]


def text_of(content: str | list[dict[str, str]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def content_of(content: str | list[TextContent] | None) -> str | list[dict[str, str]] | None:
    if isinstance(content, list):
        return [{"type": part.type, "text": part.text} for part in content]
    return content


def check_arguments(name: str, text: str) -> None:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise OptionError(f"{name}.function.arguments is {text!r:.80}; give an object as JSON")


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates know them."""
    return [
        {
            "type": tool.type,
            "function": tool.function.model_dump(exclude={"strict"}, exclude_none=True),
        }
        for tool in tools or ()
    ]


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Variables that a request has for the model's chat template."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | (body.chat_template_kwargs or {})
