"""OpenAI's Responses API over chats: bodies to chats, and answers in its form."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speq.engine.token_stream import End
from speq.generator import Token
from speq.server.answer_formats import Chunk, Events, Heading
from speq.server.api_error import ApiError, validated
from speq.server.fields import ChatBody
from speq.server.messages import event_frame
from speq.server.response_fields import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponseBody,
    ResponseToolChoice,
    texts_in,
)
from speq.text.answer_parts import AnswerPart, AnswerReader, Call


def chat_of_response(body: ResponseBody) -> ChatBody:
    """The chat that a body asks for. Raises ApiError where it is none."""
    asked: dict[str, Any] = {"messages": [*chat_messages(body)]}
    same = ("model", "temperature", "top_p", "stream", "stream_options", "parallel_tool_calls")
    asked |= {name: getattr(body, name) for name in same}
    asked["max_tokens"] = body.max_output_tokens
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in body.tools or ()
        if tool.type == "function"
    ]
    if tools:
        asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
    asked["tool_choice"] = body.tool_choice
    if isinstance(body.tool_choice, ResponseToolChoice):
        named = {"name": body.tool_choice.name}
        asked["tool_choice"] = {"type": "function", "function": named}
    if body.reasoning is not None:
        asked["reasoning_effort"] = body.reasoning.effort
    form = None if body.text is None else body.text.format
    if form is not None:
        asked["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            asked["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
    return validated(ChatBody, asked)


def chat_messages(body: ResponseBody) -> Iterator[dict[str, Any]]:
    """Messages of a chat: thoughts, text and calls that follow one another are of one answer."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    answer: dict[str, Any] = {}
    for item in body.input:
        if isinstance(item, ReasoningItem):
            if answer:
                yield answer
            thought = texts_in(item.content) or texts_in(item.summary)
            answer = {"role": "assistant", "content": ""} | (
                {"reasoning_content": thought} if thought else {}
            )
        elif isinstance(item, CallItem):
            answer = answer or {"role": "assistant", "content": ""}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if answer.get("content") or "tool_calls" in answer:
                yield answer
                answer = {}
            answer = {"role": "assistant"} | answer | {"content": texts_in(item.content)}
        else:
            if answer:
                yield answer
                answer = {}
            yield other_message(item)
    if answer:
        yield answer


def other_message(item: MessageItem | CallOutputItem) -> dict[str, Any]:
    if isinstance(item, CallOutputItem):
        output = texts_in(item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    return {"role": item.role, "content": texts_in(item.content)}


@dataclass(slots=True)
class ResponsesFormat(Events):
    """An answer as a response of items: thoughts, messages and calls of tools.

    prompt_tokens  of the chat
    """

    heading: Heading
    prompt_tokens: int
    reader: AnswerReader
    _items: list[Chunk] = field(default_factory=list, init=False)
    # Tokens, and those of them with which thoughts were told.
    _generated: int = field(default=0, init=False)
    _reasoned: int = field(default=0, init=False)
    _number: int = field(default=0, init=False)

    def opening(self) -> Iterator[Chunk]:
        begun = self._response("in_progress", None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def chunks(self, token: Token) -> Iterator[Chunk]:
        self._generated += 1
        part = self.reader.read(token)
        self._reasoned += bool(part.reasoning)
        yield from self._told(part)

    def closing(self, end: End) -> Iterator[Chunk]:
        yield from self._told(self.reader.finish())
        yield from self._close()
        status = "incomplete" if end.finish_reason == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status, end))

    def usage(self, usage: Chunk) -> Chunk:
        return self._event("ping")

    def whole(self, end: End, usage: Chunk) -> Chunk:
        status = "incomplete" if end.finish_reason == "length" else "completed"
        return self._response(status, end)

    def frame(self, chunk: Chunk) -> bytes:
        return event_frame(chunk)

    def error(self, error: ApiError) -> Chunk:
        """OpenAI's usual error; as an event it has a type as well."""
        return {"type": "error"} | error.content["error"] | error.content

    def _response(self, status: str, end: End | None) -> Chunk:
        return {
            "id": self.heading.id,
            "object": "response",
            "created_at": self.heading.created,
            "status": status,
            "error": None,
            "incomplete_details": INCOMPLETE if status == "incomplete" else None,
            "model": self.heading.model,
            "output": list(self._items) if end is not None else [],
            "parallel_tool_calls": self.reader.most_calls != 1,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if end is None else self._counts(end),
        }

    def _counts(self, end: End) -> Chunk:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.stats.get("cached_tokens", 0)},
            "output_tokens": self._generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": self.prompt_tokens + self._generated,
        }

    def _told(self, part: AnswerPart) -> Iterator[Chunk]:
        if part.reasoning:
            yield from self._add("reasoning", part.reasoning)
        if part.text:
            yield from self._add("message", part.text)
        for call in part.calls:
            yield from self._call(call)

    def _add(self, kind: str, text: str) -> Iterator[Chunk]:
        """Add to the item that is written, or begin one of another kind."""
        if not self._items or self._items[-1]["type"] != kind:
            yield from self._close()
            item: Chunk = {"type": kind, "id": new_id(ITEM_IDS[kind]), "status": "in_progress"}
            own: Chunk = {"role": "assistant"} if kind == "message" else {"summary": []}
            item |= own
            self._items.append(item | {"content": [PARTS[kind] | {"text": ""}]})
            yield self._of_item("response.output_item.added", item=item | {"content": []})
            part = dict(self._items[-1]["content"][0])
            yield self._of_part("response.content_part.added", part=part)
        self._items[-1]["content"][0]["text"] += text
        yield self._of_part(f"response.{TEXTS[kind]}.delta", delta=text)

    def _call(self, call: Call) -> Iterator[Chunk]:
        """Begin a call, or go on with it."""
        if not self._items or self._items[-1].get("call_id") != call.id:
            yield from self._close()
            begun: Chunk = {"type": "function_call", "id": new_id("fc"), "status": "in_progress"}
            begun |= {"call_id": call.id, "name": call.name, "arguments": ""}
            self._items.append(begun)
            yield self._of_item("response.output_item.added", item=dict(begun))
        item, name = self._items[-1], "response.function_call_arguments"
        item["arguments"] += call.arguments
        own = {"item_id": item["id"]}
        if call.arguments:
            yield self._of_item(f"{name}.delta", **own, delta=call.arguments)
        if call.ends:
            told = {"name": call.name, "arguments": item["arguments"]}
            yield self._of_item(f"{name}.done", **own, **told)

    def _close(self) -> Iterator[Chunk]:
        """End the item that is written."""
        if not self._items or self._items[-1]["status"] == "completed":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] in TEXTS:
            (part,) = item["content"]
            yield self._of_part(f"response.{TEXTS[item['type']]}.done", text=part["text"])
            yield self._of_part("response.content_part.done", part=part)
        yield self._of_item("response.output_item.done", item=item)

    def _of_part(self, kind: str, **fields: Any) -> Chunk:
        place = {"item_id": self._items[-1]["id"], "content_index": 0}
        return self._of_item(kind, **place | fields)

    def _of_item(self, kind: str, **fields: Any) -> Chunk:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Chunk:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields


INCOMPLETE = {"reason": "max_output_tokens"}
# By the type of an item of text: how its id begins, its part, and its events.
ITEM_IDS = {"message": "msg", "reasoning": "rs"}
PARTS: dict[str, Chunk] = {
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text"},
}
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
