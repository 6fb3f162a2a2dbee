"""Anthropic's Messages API over chats: bodies to chats, and answers in its form."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speq.engine.token_stream import End
from speq.generator import Token
from speq.server.answer_formats import Chunk, Events, Heading
from speq.server.api_error import ApiError, validated
from speq.server.fields import ChatBody
from speq.server.message_fields import (
    CountBody,
    Message,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    texts_of,
)
from speq.text.answer_parts import AnswerPart, AnswerReader, Call

# By our reason to finish.
STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
# By the status of an error.
ERROR_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"},
    **{404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"},
    503: "overloaded_error",
}


def chat_of(body: CountBody) -> ChatBody:
    """The chat that a body asks for. Raises ApiError where it is none."""
    asked: dict[str, Any] = {"model": body.model, "messages": [*chat_messages(body)]}
    tools = [tool for tool in body.tools or () if tool.input_schema is not None]
    if tools:
        asked["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in tools
        ]
    if body.tool_choice is not None:
        chosen = {"auto": "auto", "none": "none", "any": "required"}.get(body.tool_choice.type)
        named = {"type": "function", "function": {"name": body.tool_choice.name or ""}}
        asked["tool_choice"] = chosen or named
        asked["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
        asked["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        asked["thinking_token_budget"] = body.thinking.budget_tokens if thinks else None
    if body.output_config is not None:
        asked["reasoning_effort"] = body.output_config.effort
    if isinstance(body, MessagesBody):
        asked |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        asked |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream")}
    return validated(ChatBody, asked)


def chat_messages(body: CountBody) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": texts_of(body.system)}
    for message in body.messages:
        yield from messages_of(message)


def messages_of(message: Message) -> Iterator[dict[str, Any]]:
    """A message as those of a chat: results of tools come first, each a message of its own."""
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            result = {"role": "tool", "tool_call_id": block.tool_use_id}
            yield result | {"content": texts_of(block.content)}
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    said = [block for block in blocks if isinstance(block, TextBlock)]
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if said or calls or thought:
        made: dict[str, Any] = {"role": message.role, "content": texts_of(blocks)}
        if calls:
            made["tool_calls"] = calls
        if thought:
            made["reasoning_content"] = thought
        yield made


@dataclass(slots=True)
class MessagesFormat(Events):
    """An answer as a message of blocks: thoughts, text and calls of tools.

    prompt_tokens  of the chat
    """

    heading: Heading
    prompt_tokens: int
    reader: AnswerReader
    _blocks: list[Chunk] = field(default_factory=list, init=False)
    # JSON of the call that is written.
    _arguments: str = field(default="", init=False)
    _generated: int = field(default=0, init=False)

    def opening(self) -> Iterator[Chunk]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, usage)}

    def chunks(self, token: Token) -> Iterator[Chunk]:
        self._generated += 1
        yield from self._told(self.reader.read(token))

    def closing(self, end: End) -> Iterator[Chunk]:
        yield from self._told(self.reader.finish())
        if self._blocks:
            yield self._stop()
        delta = {"stop_reason": self._reason(end), "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": self._counts(end)}
        yield {"type": "message_stop"}

    def usage(self, usage: Chunk) -> Chunk:
        return {"type": "ping"}

    def whole(self, end: End, usage: Chunk) -> Chunk:
        return self._message(self._blocks, self._reason(end), self._counts(end))

    def frame(self, chunk: Chunk) -> bytes:
        return event_frame(chunk)

    def error(self, error: ApiError) -> Chunk:
        return error_content(error)

    def _counts(self, end: End) -> Chunk:
        """Tokens of the prompt count where they were run, or where their KV was reused."""
        cached = end.stats.get("cached_tokens", 0)
        return {
            "input_tokens": self.prompt_tokens - cached,
            "output_tokens": self._generated,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }

    def _message(self, blocks: list[Chunk], reason: str | None, usage: Chunk) -> Chunk:
        return {
            "id": self.heading.id,
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _told(self, part: AnswerPart) -> Iterator[Chunk]:
        if part.reasoning:
            yield from self._add("thinking", part.reasoning)
        if part.text:
            yield from self._add("text", part.text)
        for call in part.calls:
            yield from self._call(call)

    def _call(self, call: Call) -> Iterator[Chunk]:
        """Begin a call, or go on with it."""
        if not self._blocks or self._blocks[-1].get("id") != call.id:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            yield from self._start(block | {"input": {}})
            self._arguments = ""
        self._arguments += call.arguments
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if call.ends:
            self._blocks[-1]["input"] = json.loads(self._arguments)

    def _add(self, kind: str, text: str) -> Iterator[Chunk]:
        """Add to the block that is written, or begin one of another kind."""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: ""} | signature)
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: Chunk) -> Iterator[Chunk]:
        if self._blocks:
            yield self._stop()
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, delta: Chunk) -> Chunk:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop(self) -> Chunk:
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _reason(self, end: End) -> str:
        called = any(block["type"] == "tool_use" for block in self._blocks)
        return "tool_use" if called else STOP_REASONS.get(end.finish_reason, "end_turn")


def event_frame(chunk: Chunk) -> bytes:
    """A chunk as an event of its type."""
    return f"event: {chunk['type']}\ndata: {json.dumps(chunk)}\n\n".encode()


def error_content(error: ApiError) -> Chunk:
    """An error as Anthropic's API has it."""
    kind = ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
