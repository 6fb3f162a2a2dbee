"""Connections that end where nothing comes of them: uvicorn waits for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# For a request's line and headers, from the connection or from the first byte behind an answer.
HEADERS_S = 10.0
# For a client to take what was sent, where no more can be sent before.
TAKEN_S = 60.0
# Connections without a request. One more, and the oldest of them ends.
MOST_IDLE = 256


class Connection(H11Protocol):
    """HTTP/1.1 with bounds of time and number. A request that is being answered has no bound here,
    as long as its client reads.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._ending: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True where there is no request whose headers are whole and that is not yet answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()
        idle = [each for each in self.connections if isinstance(each, Connection) and each.idle]
        if len(idle) > MOST_IDLE:
            min(idle, key=lambda each: each.idle_until).end()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._ending = self._off(self._ending)
        elif self._ending is None:
            self._await_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(TAKEN_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._untaken = self._off(self._untaken)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending, self._untaken = self._off(self._ending), self._off(self._untaken)
        super().connection_lost(exc)

    @property
    def idle_until(self) -> float:
        """When it ends if nothing comes."""
        timer = self._ending or self.timeout_keep_alive_task
        return 0.0 if timer is None else timer.when()

    def end(self) -> None:
        self.transport.abort()

    def _await_headers(self) -> None:
        self._ending = self.loop.call_later(HEADERS_S, self.end)

    @staticmethod
    def _off(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
        """No timer any more."""
        if timer is not None:
            timer.cancel()
        return None
