"""Ollama's API over chats and completions: bodies to these, and answers in its form."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from speq.engine.token_stream import End
from speq.generator import Token
from speq.server.answer_formats import Chunk
from speq.server.api_error import ApiError, validated
from speq.server.fields import ChatBody, CompletionBody
from speq.server.ollama_fields import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
)
from speq.text.answer_parts import AnswerPart, AnswerReader, Call, joined_calls

# By our reason to finish.
DONE_REASONS = {"length": "length"}
# Options under the names of a chat's fields.
SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
PENALTIES = ("presence_penalty", "frequency_penalty")
NANOSECONDS_PER_MS = 1e6
DETAILS = {"format": "safetensors", "family": "moe", "families": ["moe"]}


def chat_of_ollama(body: OllamaChatBody | OllamaGenerateBody) -> ChatBody:
    """The chat that a body asks for. Raises ApiError where it is none."""
    asked = sampling_fields(body)
    if isinstance(body, OllamaChatBody):
        asked["messages"] = [*chat_messages(body.messages)]
        if body.tools:
            asked["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    else:
        said = [("system", body.system), ("user", body.prompt)]
        asked["messages"] = [{"role": role, "content": text} for role, text in said if text]
    if isinstance(body.format, dict):
        form: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": body.format}}
        asked["response_format"] = form
    elif body.format:
        asked["response_format"] = {"type": "json_object"}
    if isinstance(body.think, bool):
        asked["chat_template_kwargs"] = {"enable_thinking": body.think, "thinking": body.think}
    elif body.think:
        asked["reasoning_effort"] = body.think
    return validated(ChatBody, asked)


def completion_of(body: OllamaGenerateBody) -> CompletionBody:
    """The continuation that a raw prompt asks for. Raises ApiError where it is none."""
    asked = sampling_fields(body) | {"prompt": body.prompt}
    if isinstance(body.format, dict):
        asked["guided_json"] = body.format
    elif body.format:
        asked["structured_outputs"] = {"json_object": True}
    return validated(CompletionBody, asked)


def sampling_fields(body: OllamaBody) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": body.model, "stream": body.stream is not False}
    options = body.options
    if options is not None:
        asked |= {name: getattr(options, name) for name in (*SAME, *PENALTIES)}
        wanted = options.num_predict
        asked["max_tokens"] = None if wanted is None else max(wanted, -1)
    return asked


def chat_messages(messages: list[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Messages as those of a chat: results answer the calls before them, in their order."""
    waiting: list[str] = []
    for at, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            waiting = [f"call_{at}_{place}" for place in range(len(message.tool_calls))]
            made["tool_calls"] = [
                {
                    "id": call_id,
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments),
                    },
                }
                for call_id, call in zip(waiting, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            made["tool_call_id"] = waiting.pop(0) if waiting else f"call_{at}"
            if message.tool_name is not None:
                made["name"] = message.tool_name
        yield made


@dataclass(slots=True)
class OllamaFormat:
    """An answer in lines of JSON.

    model          as the client calls it
    prompt_tokens  of the chat or the completion
    reader         of the answer's parts
    generates      the answer is one text, and not a message
    """

    model: str
    prompt_tokens: int
    reader: AnswerReader
    generates: bool
    _parts: list[AnswerPart] = field(default_factory=list, init=False)
    # A call that is written: it is told as a whole.
    _open: list[Call] = field(default_factory=list, init=False)
    _generated: int = field(default=0, init=False)
    done = b""
    content_type = b"application/x-ndjson"

    def heartbeat(self, news: str) -> bytes:
        return b""

    def progress(self, told: Chunk) -> Iterator[Chunk]:
        yield from ()

    def opening(self) -> Iterator[Chunk]:
        yield from ()

    def chunks(self, token: Token) -> Iterator[Chunk]:
        self._generated += 1
        yield from self._told(self.reader.read(token))

    def closing(self, end: End) -> Iterator[Chunk]:
        yield from self._told(self.reader.finish())
        yield self._chunk([]) | self._counts(end)

    def usage(self, usage: Chunk) -> Chunk:
        return {}

    def whole(self, end: End, usage: Chunk) -> Chunk:
        return self._chunk(self._parts) | self._counts(end)

    def frame(self, chunk: Chunk) -> bytes:
        return json.dumps(chunk).encode() + b"\n"

    def error(self, error: ApiError) -> Chunk:
        return ollama_error(error)

    def _told(self, part: AnswerPart) -> Iterator[Chunk]:
        calls = joined_calls([*self._open, *part.calls])
        self._open = [call for call in calls if not call.ends]
        part = replace(part, calls=tuple(call for call in calls if call.ends))
        if part.text or part.reasoning or part.calls:
            self._parts.append(part)
            yield self._chunk([part])

    def _chunk(self, parts: list[AnswerPart]) -> Chunk:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        text = "".join(part.text for part in parts)
        thought = "".join(part.reasoning for part in parts)
        calls = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for part in parts
            for call in part.calls
        ]
        told: Chunk = {"response" if self.generates else "content": text}
        told |= {"thinking": thought} if thought else {}
        if not self.generates:
            told = {"message": {"role": "assistant"} | told}
            if calls:
                told["message"]["tool_calls"] = calls
        return {"model": self.model, "created_at": created} | told | {"done": False}

    def _counts(self, end: End) -> Chunk:
        """Tokens, and times in nanoseconds."""
        prompt_ms = end.stats.get("ttft_ms", 0.0)
        rest_ms = (end.stats.get("tpot_ms") or 0.0) * max(self._generated - 1, 0)
        prompt, rest = (round(each * NANOSECONDS_PER_MS) for each in (prompt_ms, rest_ms))
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(end.finish_reason, "stop"),
            "total_duration": prompt + rest,
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": self._generated,
            "eval_duration": rest,
        }


def ollama_error(error: ApiError) -> Chunk:
    """An error as Ollama has it."""
    return {"error": error.message}


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """The served model as Ollama's clients ask of it. Sizes that they show are not told."""

    name: str
    max_context: int
    takes_tools: bool

    def listed(self) -> Chunk:
        unknown = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": ""}
        return {"name": self.name, "model": self.name, "details": DETAILS} | unknown

    def shown(self) -> Chunk:
        return {
            "details": DETAILS,
            "model_info": {
                "general.architecture": "moe",
                "moe.context_length": self.max_context,
            },
            "capabilities": ["completion", *(["tools"] if self.takes_tools else [])],
        }


def loaded(name: str, generates: bool) -> Chunk:
    """The answer to a body without a prompt, which asks for the model to be loaded."""
    form = OllamaFormat(name, 0, AnswerReader(), generates)
    return form.whole(End("stop"), {}) | {"done_reason": "load"}
