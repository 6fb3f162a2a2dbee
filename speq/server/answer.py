"""A response that reads streams of tokens, and lets go of them when its client leaves."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speq.dashboard.live.event_stream import run_while_connected
from speq.engine.engine_thread import EngineThread
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError, present
from speq.generator import Token
from speq.server.answer_formats import AnswerFormat, Chunk, tokens_used, usage_of
from speq.server.api_error import ApiError, error_of
from speq.server.fields import SampledBody, StreamOptions

# A line that clients pass over, where there is nothing to say for so long: proxies cut silent
# lines. How far a prompt is run is told more often, to those who ask for it.
HEARTBEAT_S = 15.0
PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One of the texts that a client asked for. format: writes it"""

    stream: TokenStream
    format: AnswerFormat

    @property
    def end(self) -> End:
        """How the stream ended, which was read to its end."""
        return present(self.stream.end, "a stream that is read to its end has none")


class Answer(Response):
    """Sends an answer and ends; where the client leaves before, cancels its streams."""

    def __init__(self, thread: EngineThread, choices: list[TextChoice]) -> None:
        super().__init__()
        self._thread, self._choices = thread, choices
        self._format = choices[0].format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(self._tell(send), receive)
        finally:
            for each in self._choices:
                self._thread.cancel(each.stream)

    async def _tell(self, send: Send) -> None:
        raise NotImplementedError

    async def _refuse(self, error: ApiError, send: Send) -> None:
        body = json.dumps(self._format.error(error)).encode()
        await complete(error.status, body, error.headers, send)

    def _usage(self) -> Chunk:
        # Choices of one prompt share its list.
        prompts = {id(ids): len(ids) for ids in map(prompt_of, self._choices)}
        return usage_of(sum(prompts.values()), [each.end for each in self._choices])


def prompt_of(choice: TextChoice) -> list[int]:
    return choice.stream.request.prompt_token_ids


class WholeAnswer(Answer):
    """In one piece of JSON."""

    async def _tell(self, send: Send) -> None:
        try:
            for each in self._choices:
                async for token in each.stream:
                    for _ in each.format.chunks(token):
                        continue
                for _ in each.format.closing(each.end):
                    continue
        except SpeqError as error:
            await self._refuse(error_of(error), send)
            return
        usage = self._usage()
        whole, *others = [each.format.whole(each.end, usage) for each in self._choices]
        for other in others:
            whole["choices"] += other["choices"]
        await complete(200, json.dumps(whole).encode(), {}, send)


@dataclass(frozen=True, slots=True)
class ToldBeside:
    """What a stream tells beside its text.

    usage     what the request took, at its end
    counts    tokens so far, with each chunk
    progress  how far the prompt is run
    timings   of each token: its origin, its step's waiting, and the pace so far
    """

    usage: bool = False
    counts: bool = False
    progress: bool = False
    timings: bool = False

    @classmethod
    def of(cls, body: SampledBody) -> "ToldBeside":
        options = body.stream_options or StreamOptions()
        return cls(
            bool(options.include_usage),
            bool(options.continuous_usage_stats),
            bool(body.return_progress),
            bool(body.timings_per_token),
        )


class StreamedAnswer(Answer):
    """Server-sent events.

    An error before the first token is a response of its own, as long as no line was sent.
    """

    def __init__(self, thread: EngineThread, choices: list[TextChoice], beside: ToldBeside) -> None:
        super().__init__(thread, choices)
        self._beside = beside

    async def _tell(self, send: Send) -> None:
        begun = False
        try:
            # Closed here, where a client leaves as well, and not by whichever thread collects it.
            async with aclosing(self._events()) as events:
                async for news in events:
                    if not begun:
                        begun = True
                        headers = [(b"content-type", self._format.content_type), *HEADERS]
                        start = {"type": "http.response.start", "status": 200, "headers": headers}
                        await send(start)
                    await send({"type": "http.response.body", "body": news, "more_body": True})
        except SpeqError as error:
            told = error_of(error)
            if not begun:
                await self._refuse(told, send)
                return
            last = self._format.frame(self._format.error(told)) + self._format.done
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opening = b"".join(self._frames(each.format.opening()) for each in self._choices)
        counts = [0] * len(self._choices)
        begun_s = [0.0] * len(self._choices)
        streams = [each.stream for each in self._choices]
        every_s = PROGRESS_S if self._beside.progress else HEARTBEAT_S
        async with aclosing(tokens_of(streams, every_s)) as tokens:
            async for news in tokens:
                if news is None and self._beside.progress:
                    told = b"".join(self._frames(progress_of(each)) for each in self._choices)
                elif news is None:
                    told = self._format.heartbeat(waiting_for(streams[0]))
                else:
                    at, token = news
                    if not counts[at]:
                        begun_s[at] = time.perf_counter()
                    counts[at] += token is not None
                    told = self._frames(
                        self._chunks(self._choices[at], token, counts[at], begun_s[at])
                    )
                if opening + told:
                    yield opening + told
                opening = b""
        last = b""
        if self._beside.usage:
            last = self._frames([self._format.usage(self._usage())])
        yield opening + last + self._format.done

    def _frames(self, chunks: Iterable[Chunk]) -> bytes:
        return b"".join(map(self._format.frame, chunks))

    def _chunks(
        self, choice: TextChoice, token: Token | None, count: int, begun_s: float
    ) -> Iterator[Chunk]:
        """Those of a token, or of the end where it is None.

        count  tokens of the choice so far, the first of which came at `begun_s`
        """
        if token is None:
            yield from choice.format.closing(choice.end)
            return
        beside: Chunk = {}
        if self._beside.counts:
            beside["usage"] = tokens_used(len(prompt_of(choice)), count)
        if self._beside.timings:
            beside["timings"] = timings_of(token, count, time.perf_counter() - begun_s)
        for chunk in choice.format.chunks(token):
            yield chunk | beside


def timings_of(token: Token, count: int, passed_s: float) -> Chunk:
    """A token's origin and its step's waiting, and the pace so far by llama.cpp's names."""
    return {
        "origin": token.origin,
        "waited_ms": token.waited_s * 1e3,
        "predicted_n": count,
        "predicted_ms": passed_s * 1e3,
        "predicted_per_second": (count - 1) / passed_s if passed_s > 0 and count > 1 else None,
    }


def progress_of(choice: TextChoice) -> Iterator[Chunk]:
    """How far a prompt is run, by llama.cpp's names, and how many requests are ahead of it."""
    stream, count = choice.stream, len(prompt_of(choice))
    told = {
        "total": count,
        "cache": stream.request.metrics.cached_tokens,
        "processed": stream.prefilled,
        "time_ms": 0.0 if stream.ahead else (time.perf_counter() - stream.start_s) * 1e3,
        "requests_ahead": stream.ahead,
    }
    yield from choice.format.progress(told)


def waiting_for(stream: TokenStream) -> str:
    """What a stream waits for, in a few words."""
    count = len(stream.request.prompt_token_ids)
    if stream.ahead:
        return f"{stream.ahead} requests ahead"
    if stream.prefilled < count:
        return f"{stream.prefilled} of {count} tokens of the prompt"
    return "here"


HEADERS = [
    (b"cache-control", b"no-store"),
    # nginx would hold the text back.
    (b"x-accel-buffering", b"no"),
]


async def tokens_of(
    streams: Sequence[TokenStream], every_s: float = HEARTBEAT_S
) -> AsyncGenerator[tuple[int, Token | None] | None, None]:
    """Tokens with the place of their stream, as they come; None for a token where a stream ends,
    and None alone where there was nothing for so long.
    """
    reading = {next_of(stream): at for at, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(
                reading, timeout=every_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for task in sorted(done, key=lambda each: reading[each]):
                at, token = reading.pop(task), task.result()
                if token is not None:
                    reading[next_of(streams[at])] = at
                yield at, token
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def next_of(stream: TokenStream) -> "asyncio.Task[Token | None]":
    """A task of a stream's next token; None: there is none."""

    async def read() -> Token | None:
        return await anext(stream, None)

    return asyncio.ensure_future(read())


async def respond(error: ApiError, send: Send) -> None:
    await complete(error.status, error.body, error.headers, send)


async def complete(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    """Send a response of JSON."""
    told = {"content-type": "application/json", "content-length": str(len(body))} | headers
    pairs = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
