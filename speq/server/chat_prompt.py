"""From the messages of a chat to what the model's template takes."""

import json
from typing import Any

from jinja2 import Environment, TemplateError, meta

from speq.errors import SpeqError
from speq.server.fields import Message, TextPart, Tool

# What a template that calls tools in Hermes' form has in it, and what other forms have.
HERMES, OTHERS = "<tool_call>", ("<function=", "<arg_key>", "<|channel|>", "[TOOL_CALLS]")


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: texts, the role system, arguments as objects.

    Raises SpeqError for arguments that are no object, and for a message without content.
    """
    return [template_message(f"messages[{at}]", each) for at, each in enumerate(messages)]


def template_message(name: str, message: Message) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise SpeqError(f"{name}.content is null; give a text")
    made: dict[str, Any] = {
        # OpenAI's newer name of it.
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(f"{name}.tool_calls[{at}]", call.function.arguments),
                },
            }
            for at, call in enumerate(message.tool_calls)
        ]
    return made


def text_of(content: str | list[TextPart] | None) -> str:
    """The parts of a text each begin a line."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def arguments_of(name: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise SpeqError(f"{name}.function.arguments is {text!r:.80}; give an object as JSON")
    return arguments


def template_tools(tokenizer: Any, tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates know them. Raises SpeqError where the model's has no place for them, or
    would have the model call them in a form that is not parsed here.
    """
    if not tools:
        return []
    made = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        template = tokenizer.get_chat_template(tools=made)
        names = meta.find_undeclared_variables(Environment().parse(template))
    except (ValueError, TemplateError) as error:
        raise SpeqError(f"tools are given and the model has no chat template: {error}") from error
    if "tools" not in names:
        raise SpeqError("tools are given and the model's chat template has no place for them")
    if HERMES not in template or any(each in template for each in OTHERS):
        raise SpeqError(
            "tools are given and the model calls them in a form that speq does not parse; only "
            f"that of Hermes and Qwen is parsed, {HERMES}{{...}}</tool_call>"
        )
    return made
