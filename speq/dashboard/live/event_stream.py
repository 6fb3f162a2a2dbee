"""Events of a bus as server-sent events, for as long as a browser listens."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speq.dashboard.live.event_bus import EventBus, LiveEvent, Subscriber

# A line that says nothing, so that a connection that was cut is noticed.
HEARTBEAT_S = 15.0
HEARTBEAT = b": here\n\n"


def write_frame(event: LiveEvent) -> bytes:
    """Write an event as the format has it. Its data is in one line."""
    return f"event: {event.kind}\ndata: {event.data}\n\n".encode()


class EventStream(Response):
    """Ends where the browser leaves or the bus closes, and leaves nothing behind.

    While a browser does not read, `send` waits, and the subscriber takes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, bus: EventBus) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._bus = bus

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, fresh = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(fresh.set)

        with self._bus.subscribe(wake) as subscriber:
            await run_while_connected(self._send_events(subscriber, fresh, send), receive)

    async def _send_events(self, subscriber: Subscriber, fresh: asyncio.Event, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        while True:
            fresh.clear()
            closed = subscriber.closed
            news = b"".join(write_frame(event) for event in self._bus.take(subscriber))
            # At once also where there is none: browsers wait for a first byte.
            await send(
                {"type": "http.response.body", "body": news or HEARTBEAT, "more_body": not closed}
            )
            if closed:
                return
            # Unlike `wait_for`, which may lose the cancellation of a browser that leaves.
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await fresh.wait()


async def run_while_connected(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run what sends a response until it ends, or its client leaves."""
    tasks = [asyncio.ensure_future(sending), asyncio.ensure_future(wait_for_disconnect(receive))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what went wrong, which would be lost
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
