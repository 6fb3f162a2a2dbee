"""A response that reads one stream of tokens, and lets go of it when its client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speq.dashboard.live.event_stream import run_while_connected
from speq.engine.engine_thread import EngineThread
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError, present
from speq.generator import Token
from speq.server.answer_formats import AnswerFormat, Chunk, tokens_used, usage_of
from speq.server.api_error import ApiError, error_of
from speq.server.fields import StreamOptions

# A line that says nothing, where there is nothing to say for so long: proxies cut silent lines.
HEARTBEAT_S = 15.0
HEARTBEAT = b": here\n\n"


class Answer(Response):
    """Sends an answer and ends; where the client leaves before, cancels its stream."""

    def __init__(self, thread: EngineThread, stream: TokenStream, format: AnswerFormat) -> None:
        super().__init__()
        self._thread, self._stream, self._format = thread, stream, format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(self._tell(send), receive)
        finally:
            self._thread.cancel(self._stream)

    async def _tell(self, send: Send) -> None:
        raise NotImplementedError

    async def _refuse(self, error: ApiError, send: Send) -> None:
        body = json.dumps(self._format.error(error)).encode()
        await complete(error.status, body, error.headers, send)

    def _usage(self) -> Chunk:
        return usage_of(len(self._stream.request.prompt_token_ids), self._end)

    @property
    def _end(self) -> End:
        """How the stream ended, which was read to its end."""
        return present(self._stream.end, "a stream that is read to its end has none")


class WholeAnswer(Answer):
    """In one piece of JSON."""

    async def _tell(self, send: Send) -> None:
        try:
            async for token in self._stream:
                for _ in self._format.chunks(token):
                    continue
        except SpeqError as error:
            await self._refuse(error_of(error), send)
            return
        end = self._end
        for _ in self._format.closing(end):
            continue
        body = json.dumps(self._format.whole(end, self._usage())).encode()
        await complete(200, body, {}, send)


class StreamedAnswer(Answer):
    """Server-sent events. options: where they say what the request took.

    An error before the first token is a response of its own, as long as no line was sent.
    """

    def __init__(
        self,
        thread: EngineThread,
        stream: TokenStream,
        format: AnswerFormat,
        options: StreamOptions,
    ) -> None:
        super().__init__(thread, stream, format)
        self._options = options

    async def _tell(self, send: Send) -> None:
        begun = False
        try:
            # Closed here, where a client leaves as well, and not by whichever thread collects it.
            async with aclosing(self._events()) as events:
                async for news in events:
                    if not begun:
                        begun = True
                        start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
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
        opening, count = self._frames(self._format.opening()), 0
        async with aclosing(with_heartbeats(self._stream)) as tokens:
            async for token in tokens:
                if token is None:
                    yield opening + HEARTBEAT
                else:
                    count += 1
                    yield opening + self._frames(self._counted(self._format.chunks(token), count))
                opening = b""
        last = self._frames(self._format.closing(self._end))
        if self._options.include_usage:
            last += self._frames([self._format.usage(self._usage())])
        yield opening + last + self._format.done

    def _frames(self, chunks: Iterable[Chunk]) -> bytes:
        return b"".join(map(self._format.frame, chunks))

    def _counted(self, chunks: Iterable[Chunk], generated: int) -> Iterable[Chunk]:
        """Chunks with the tokens so far, where they were asked for."""
        if not self._options.continuous_usage_stats:
            return chunks
        usage = tokens_used(len(self._stream.request.prompt_token_ids), generated)
        return (chunk | {"usage": usage} for chunk in chunks)


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would hold the text back.
    (b"x-accel-buffering", b"no"),
]


async def with_heartbeats(
    stream: TokenStream, every_s: float = HEARTBEAT_S
) -> AsyncGenerator[Token | None, None]:
    """The tokens, and None where there was none for so long."""
    while True:
        try:
            # Unlike `wait_for`, which may lose the cancellation of a client that leaves.
            async with asyncio.timeout(every_s):
                token: Token | None = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            token = None
        yield token


async def respond(error: ApiError, send: Send) -> None:
    await complete(error.status, error.body, error.headers, send)


async def complete(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    """Send a response of JSON."""
    told = {"content-type": "application/json", "content-length": str(len(body))} | headers
    pairs = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
