"""From the messages of a chat to what the model's template takes."""

import json
from typing import Any

from speq.errors import OptionError, UnsupportedError
from speq.server.fields import ChatMessage, TextContent, Tool

# What a template that calls tools in Hermes' form has in it, and what other forms have.
HERMES, OTHERS = "<tool_call>", ("<function=", "<arg_key>", "<|channel|>", "[TOOL_CALLS]")


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them, without what templates do not know.

    Raises SpeqError for arguments that are no object, and for a message without content.
    """
    return [template_message(f"messages[{at}]", each) for at, each in enumerate(messages)]


def template_message(name: str, message: ChatMessage) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise OptionError(f"{name}.content is null; give a text")
    made: dict[str, Any] = {
        # OpenAI's newer name of it.
        "role": "system" if message.role == "developer" else message.role,
        "content": content_of(message.content),
    }
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        for at, call in enumerate(message.tool_calls):
            check_arguments(f"{name}.tool_calls[{at}]", call.function.arguments)
        made["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return made


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


def template_tools(tokenizer: Any, tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates know them. Raises SpeqError where the model would call them in a form that
    is not parsed here.
    """
    if not tools:
        return []
    made = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        template = tokenizer.get_chat_template(tools=made)
    except ValueError as error:
        raise OptionError(f"tools are given and the model has no chat template: {error}") from error
    if HERMES in template and not any(each in template for each in OTHERS):
        return made
    if "tools" not in template:
        raise UnsupportedError(
            "tools are given and the model's chat template has no place for them"
        )
    raise UnsupportedError(
        "tools are given and the model calls them in a form that speq does not parse; only "
        f"that of Hermes and Qwen is parsed, {HERMES}{{...}}</tool_call>"
    )
