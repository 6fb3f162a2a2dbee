"""Tokens of one request, from the thread of an engine to the event loop that asked."""

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from speq.errors import SpeqError
from speq.generator import Token

if TYPE_CHECKING:
    from speq.server.engine_worker import End, EngineRequest


class TokenStream:
    """Made in the event loop that reads it, with `async for`; written to from any thread.

    It holds what was not read yet: as many tokens at most as were asked for.

    asked_s    when the request was submitted, by the engine's clock
    end        how it ended, once all is read
    cancelled  nobody reads it any more
    """

    def __init__(self, request: "EngineRequest", asked_s: float) -> None:
        self.request, self.asked_s = request, asked_s
        self.end: End | None = None
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._fresh = asyncio.Event()
        self._tokens: deque[Token] = deque()
        self._error: SpeqError | None = None

    # --- the engine's side ---

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        self._wake()

    def finish(self, end: "End") -> None:
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
            # Before the rest is looked at: who writes afterwards wakes us, and the last token comes
            # before the end.
            self._fresh.clear()
            ended, error = self.end is not None, self._error
            if self._tokens:
                return self._tokens.popleft()
            if error is not None:
                raise error
            if ended:
                raise StopAsyncIteration
            await self._fresh.wait()
