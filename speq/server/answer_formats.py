"""Answers in the two forms of OpenAI's API: whole, or chunk by chunk."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Protocol

from speq.engine.logprobs import PromptLogprobs
from speq.engine.token_stream import End
from speq.generator import Token
from speq.server.api_error import ApiError
from speq.server.token_logprobs import chat_entry, completion_lists
from speq.text.answer_parts import AnswerPart, AnswerReader, Call, joined_calls
from speq.text.stream import TextStream
from speq.text.vocabulary import Vocabulary

# By our reason to finish.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "stopped": "stop"}
Chunk = dict[str, Any]
# Figures of requests whose mean is told.
MEANS = ("accept_length", "draft_length", "batch")


# The end of a stream.
DONE = b"data: [DONE]\n\n"


class AnswerFormat(Protocol):
    """Writes one answer. Chunks are given in the order in which they are sent.

    done          what ends a stream
    content_type  of a stream
    """

    done: bytes
    content_type: bytes

    def heartbeat(self, news: str) -> bytes:
        """A line that clients pass over, where there was nothing to say for long."""

    def progress(self, told: Chunk) -> Iterator[Chunk]:
        """How far a prompt is run, for clients that ask for it."""

    def frame(self, chunk: Chunk) -> bytes:
        """A chunk as a server-sent event."""

    def error(self, error: ApiError) -> Chunk:
        """An error, as a chunk or in place of the answer."""

    def opening(self) -> Iterator[Chunk]:
        """Before the first token."""

    def chunks(self, token: Token) -> Iterator[Chunk]:
        """What is certain with a token."""

    def closing(self, end: End) -> Iterator[Chunk]:
        """Behind the last token."""

    def usage(self, usage: Chunk) -> Chunk:
        """The last chunk where a client asked what it took."""

    def whole(self, end: End, usage: Chunk) -> Chunk:
        """The answer in one piece, once all its chunks were made."""


def tokens_used(prompt_tokens: int, generated: int) -> Chunk:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }


def usage_of(prompt_tokens: int, ends: Sequence[End]) -> Chunk:
    """What the choices of a request took. `speq`: what only an engine like this one has to tell,
    times of the choice that took longest.
    """
    stats = [end.stats for end in ends if end.stats]
    usage = tokens_used(prompt_tokens, sum(each["new_tokens"] for each in stats))
    if stats:
        cached = sum(each["cached_tokens"] for each in stats)
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached, prompt_tokens)}
        usage["speq"] = {
            **{name: mean_of([each[f"{name}_mean"] for each in stats]) for name in MEANS},
            "moved_bytes": sum(each["moved_bytes"] + each["prefill_moved_bytes"] for each in stats),
            "waited_ms": max(each["stall_s"] + each["prefill_stall_s"] for each in stats) * 1e3,
            "queued_ms": max(end.queued_s for end in ends) * 1e3,
        }
    return usage


def mean_of(values: list[float | None]) -> float | None:
    """The mean of those that there are."""
    there = [each for each in values if each is not None]
    return mean(there) if there else None


@dataclass(slots=True)
class Heading:
    """What all chunks of one answer have in common. created: seconds since 1970."""

    model: str
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def chunk(self, kind: str, choices: list[Chunk], usage: Chunk | None) -> Chunk:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


class Events:
    """A stream of server-sent events."""

    done = b""
    content_type = b"text/event-stream; charset=utf-8"

    def heartbeat(self, news: str) -> bytes:
        return f": {news}\n\n".encode()

    def progress(self, told: Chunk) -> Iterator[Chunk]:
        yield from ()


class OpenAIEvents(Events):
    """Chunks as OpenAI's API sends them."""

    done = DONE

    def frame(self, chunk: Chunk) -> bytes:
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def error(self, error: ApiError) -> Chunk:
        return error.content


@dataclass(slots=True)
class ChatFormat(OpenAIEvents):
    """An answer of a chat. index: its place among several"""

    heading: Heading
    vocabulary: Vocabulary
    reader: AnswerReader
    index: int = 0
    _said: list[str] = field(default_factory=list, init=False)
    _thought: list[str] = field(default_factory=list, init=False)
    _calls: list[Call] = field(default_factory=list, init=False)
    _logprobs: list[Chunk] = field(default_factory=list, init=False)

    def opening(self) -> Iterator[Chunk]:
        yield self._chunk({"role": "assistant", "content": ""})

    def progress(self, told: Chunk) -> Iterator[Chunk]:
        yield self._chunk({}) | {"prompt_progress": told}

    def chunks(self, token: Token) -> Iterator[Chunk]:
        piece = self.reader.read(token)
        logprobs = [] if token.logprobs is None else [chat_entry(self.vocabulary, token)]
        self._logprobs += logprobs
        yield from self._told(piece, logprobs)

    def closing(self, end: End) -> Iterator[Chunk]:
        yield from self._told(self.reader.finish(), [])
        yield self._chunk({}, self._reason(end))

    def usage(self, usage: Chunk) -> Chunk:
        return self.heading.chunk("chat.completion.chunk", [], usage)

    def whole(self, end: End, usage: Chunk) -> Chunk:
        text = "".join(self._said)
        message: Chunk = {"role": "assistant", "content": text, "refusal": None}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [call.content for call in self._calls]
        choice = {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
            "finish_reason": self._reason(end),
        }
        return self.heading.chunk("chat.completion", [choice], usage)

    def _told(self, piece: AnswerPart, logprobs: list[Chunk]) -> Iterator[Chunk]:
        """Chunks with what is certain; nothing where that is nothing."""
        if piece.reasoning:
            self._thought.append(piece.reasoning)
            yield self._chunk({"reasoning_content": piece.reasoning})
        if piece.text or logprobs:
            self._said.append(piece.text)
            yield self._chunk({"content": piece.text}, logprobs=logprobs)
        for call in piece.calls:
            goes_on = bool(self._calls) and self._calls[-1].id == call.id
            told = {"function": {"arguments": call.arguments}} if goes_on else call.content
            self._calls = joined_calls([*self._calls, call])
            if call.arguments or not goes_on:
                yield self._chunk({"tool_calls": [{"index": len(self._calls) - 1} | told]})

    def _reason(self, end: End) -> str:
        return "tool_calls" if self._calls else FINISH_REASONS[end.finish_reason]

    def _chunk(
        self, delta: Chunk, reason: str | None = None, logprobs: list[Chunk] | None = None
    ) -> Chunk:
        choice = {
            "index": self.index,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": reason,
        }
        return self.heading.chunk("chat.completion.chunk", [choice], None)


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is told before its text. logprobs: of its tokens, once all were run; None:
    nobody asks
    """

    vocabulary: Vocabulary
    text: str
    token_ids: list[int]
    logprobs: PromptLogprobs | None

    def tokens(self) -> list[Token]:
        """Its tokens, the first of which has no log-probability."""
        stream = TextStream(self.vocabulary)
        pieces = [stream.feed(each) for each in self.token_ids]
        pieces[-1] = pieces[-1].then(stream.finish())
        noted = [None] * len(pieces) if self.logprobs is None else [None, *self.logprobs.noted]
        found = zip(self.token_ids, pieces, noted, strict=True)
        return [Token(token_id, piece.text, known) for token_id, piece, known in found]


@dataclass(slots=True)
class CompletionFormat(OpenAIEvents):
    """An answer that continues a text. index: its place among several; echo: told before it"""

    heading: Heading
    vocabulary: Vocabulary
    index: int = 0
    echo: EchoedPrompt | None = None
    _prompt: list[Token] = field(default_factory=list, init=False)
    _tokens: list[Token] = field(default_factory=list, init=False)
    _length: int = field(default=0, init=False)

    def opening(self) -> Iterator[Chunk]:
        yield from ()

    def progress(self, told: Chunk) -> Iterator[Chunk]:
        yield self._chunk("", [], 0) | {"prompt_progress": told}

    def chunks(self, token: Token) -> Iterator[Chunk]:
        if self.echo is not None and not self._tokens:
            self._prompt, self._length = self.echo.tokens(), len(self.echo.text)
            yield self._chunk(self.echo.text, self._prompt, 0)
        if token.text or token.logprobs is not None:
            yield self._chunk(token.text, [token], self._length)
        self._tokens.append(token)
        self._length += len(token.text)

    def closing(self, end: End) -> Iterator[Chunk]:
        yield self._chunk("", [], self._length, FINISH_REASONS[end.finish_reason])

    def usage(self, usage: Chunk) -> Chunk:
        return self.heading.chunk("text_completion", [], usage)

    def whole(self, end: End, usage: Chunk) -> Chunk:
        text = "".join(token.text for token in self._tokens)
        if self.echo is not None:
            text = self.echo.text + text
        tokens = [*self._prompt, *self._tokens]
        return self._chunk(text, tokens, 0, FINISH_REASONS[end.finish_reason], usage)

    def _chunk(
        self,
        text: str,
        tokens: list[Token],
        offset: int,
        reason: str | None = None,
        usage: Chunk | None = None,
    ) -> Chunk:
        told = any(token.logprobs is not None for token in tokens)
        choice = {
            "index": self.index,
            "text": text,
            "logprobs": completion_lists(self.vocabulary, tokens, offset) if told else None,
            "finish_reason": reason,
        }
        return self.heading.chunk("text_completion", [choice], usage)
