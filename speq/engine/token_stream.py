"""Tokens of one request, from the engine's thread to the event loop that asked."""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from speq.engine.request import Request, Token
from speq.errors import SpeqError


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request.

    finish_reason  "eos", "length", "stop", or "stopped" if it was cancelled
    stats          see `Request.figures`; empty if it was cancelled
    queued_s       time that it waited in the queue
    """

    finish_reason: str
    stats: dict[str, Any] = field(default_factory=dict)
    queued_s: float = 0.0


class QueueFull(SpeqError):
    """No more requests may wait. retry_after_s: when it may be worth to ask again."""

    code = "queue_full"

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class Unavailable(SpeqError):
    """The engine has died, or ends."""

    code = "unavailable"


class EngineFailed(SpeqError):
    """The engine failed at a request that was sound."""

    code = "engine_failed"


class TokenStream:
    """Made in the event loop that reads it, with `async for`; written to from any thread.

    It holds what was not read yet: as many tokens at most as were asked for.

    arrival_s  when the request was submitted, by the engine's clock
    start_s    when a batch took it
    ahead      requests that run or wait before it; 0 once a batch has taken it
    prefilled  tokens of its prompt whose KV is there
    end        how it ended, once all is read
    cancelled  nobody reads it any more
    """

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request, self.arrival_s = request, arrival_s
        self.start_s = arrival_s
        self.ahead = self.prefilled = 0
        self.end: End | None = None
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._fresh = asyncio.Event()
        self._tokens: deque[Token] = deque()
        self._error: SpeqError | None = None

    # --- the engine's side ---

    @property
    def queued_s(self) -> float:
        """Time that it waited in the queue."""
        return self.start_s - self.arrival_s

    def put(self, tokens: list[Token]) -> None:
        self._tokens.extend(tokens)
        self._wake()

    def finish(self, end: End) -> None:
        """There are no more tokens."""
        self.end = end
        self._wake()

    def fail(self, error: SpeqError) -> None:
        """There are no more tokens, because of this error; the first one counts."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        # A loop that was closed has no readers.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fresh.set)

    # --- the reader's side ---

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Token:
        """The next token. Raises SpeqError where the engine failed, or refused the request."""
        while True:
            # Before the rest is looked at: the writer wakes us after it wrote, and the last token
            # comes before the end.
            self._fresh.clear()
            ended, error = self.end is not None, self._error
            if self._tokens:
                return self._tokens.popleft()
            if error is not None:
                raise error
            if ended:
                raise StopAsyncIteration
            await self._fresh.wait()
