"""Bodies of requests while they come in: each has a time, and all of them have a bound together.

Clients that send half a body hold up nobody: where too much is on its way, the body that has been
for longest gives way to the next one.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import Message, Receive

# What a body may take, and for each byte of it: 100 kB in a second.
PATIENCE_S, BYTE_S = 10.0, 1e-5
# What a connection may have read ahead, whatever the body's length: uvicorn stops there.
AHEAD_BYTES = 64 << 10


@dataclass(slots=True)
class Incoming:
    """Bodies on their way.

    most_bytes  that they take together; one alone may take more
    """

    most_bytes: int
    _coming: dict[asyncio.Timeout, int] = field(default_factory=dict, init=False)

    async def whole(self, receive: Receive, length: int) -> bytes | None:
        """A body of so many bytes; None where its client left before it was whole.

        Raises TimeoutError where it took too long, or gave way to others.
        """
        parts: list[bytes] = []
        async with asyncio.timeout(PATIENCE_S + length * BYTE_S) as until:
            self._coming[until] = length + AHEAD_BYTES
            try:
                self._make_room(until)
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        return b"".join(parts)
            finally:
                del self._coming[until]

    def _make_room(self, newest: asyncio.Timeout) -> None:
        over = sum(self._coming.values()) - self.most_bytes
        now = asyncio.get_running_loop().time()
        for until, taken in self._coming.items():  # in the order in which they came
            if over <= 0 or until is newest:
                return
            over -= taken
            until.reschedule(now)


def given_again(body: bytes, receive: Receive) -> Receive:
    """What an application receives of a body that was read, and of what comes behind it."""
    parts = [body]

    async def received() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return received
