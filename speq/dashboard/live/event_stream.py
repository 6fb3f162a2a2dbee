"""A generation's events as server-sent events, for as long as a browser listens."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speq.dashboard.live.broadcast import Broadcast, Event, Listener

# A line that says nothing, so that a connection that was cut is noticed.
HEARTBEAT_S = 15.0
HEARTBEAT = b": here\n\n"


def frame(event: Event) -> bytes:
    """An event as the format has it. Its data is in one line."""
    return f"event: {event.kind}\ndata: {event.data}\n\n".encode()


class EventStream(Response):
    """Ends where the browser leaves or the broadcast closes, and leaves nothing behind.

    While a browser does not read, `send` waits, and the listener takes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, broadcast: Broadcast) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._broadcast = broadcast

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, fresh = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(fresh.set)

        with self._broadcast.listening(wake) as listener:
            tasks = [
                asyncio.ensure_future(self._tell(listener, fresh, send)),
                asyncio.ensure_future(left(receive)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what went wrong, which would be lost
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, listener: Listener, fresh: asyncio.Event, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        while True:
            fresh.clear()
            closed = listener.closed
            news = b"".join(frame(event) for event in self._broadcast.take(listener))
            # At once also where there is none: browsers wait for a first byte.
            await send(
                {"type": "http.response.body", "body": news or HEARTBEAT, "more_body": not closed}
            )
            if closed:
                return
            try:
                await asyncio.wait_for(fresh.wait(), HEARTBEAT_S)
            except TimeoutError:
                continue


async def left(receive: Receive) -> None:
    """Return when the browser has left."""
    while (await receive())["type"] != "http.disconnect":
        continue
