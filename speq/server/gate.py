"""Who may ask the server for something: those who hold a key or, without keys, this machine alone.

Without keys a browser of this machine would let any page ask: so `Host` must be our own then, and
`Origin`, where there is one. Nothing of a refused request reaches the application.
"""

from dataclasses import dataclass

from speq.dashboard.live.guard import (
    App,
    Headers,
    Message,
    Receive,
    Refusal,
    Send,
    bearers,
    refused_body,
    refused_host,
    refused_origin,
    values,
)
from speq.server.answer import respond
from speq.server.api_error import ApiError
from speq.server.incoming import Incoming, given_again
from speq.server.keys import Keys, digest

# What load balancers ask, which have no key.
OPEN_PATHS = frozenset({"/health"})
# Of bodies on their way: so many of the longest, and some short ones.
BODIES, BODIES_BYTES = 4, 16 << 20
# Of a request's scope: who asks, where there are several keys.
OWNER_KEY = "speq.owner"


@dataclass(frozen=True, slots=True)
class Access:
    """authorities: what may stand in `Host` where there are no keys; max_requests: those that are
    looked at or answered at a time, which bounds the memory that whole bodies take.
    """

    authorities: frozenset[str]
    keys: Keys | None
    max_body_bytes: int
    max_requests: int

    def refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """Why a request is refused; None where it is not."""
        headers = list(headers)
        refused = self._stranger(headers) if self.keys is None else None
        if refused is not None:
            return ApiError(refused.status, refused.sentence)
        if self.keys is not None and path not in OPEN_PATHS and not self._known(headers):
            given = "has another key" if bearers(headers) else "has no key"
            return ApiError(
                401,
                f"the request {given}; give Authorization: Bearer KEY with a key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        refused = refused_body(method, headers, self.max_body_bytes)
        return None if refused is None else ApiError(refused.status, refused.sentence)

    def owner(self, headers: Headers) -> str:
        """Who asks, of a request that is not refused: all are one where there is one key."""
        if self.keys is None or len(self.keys.digests) == 1:
            return ""
        return "".join(digest(given).hex() for given in bearers(headers))

    def _stranger(self, headers: Headers) -> Refusal | None:
        return refused_host(headers, self.authorities) or refused_origin(headers, self.authorities)

    def _known(self, headers: Headers) -> bool:
        given = bearers(headers)
        return len(given) == 1 and self.keys is not None and self.keys.hold(given[0])


class Gate:
    """An ASGI application behind `Access`. It sees bodies that are whole, and no others."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access
        self._incoming = Incoming(access.max_body_bytes * BODIES + BODIES_BYTES)
        self._requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._access.refusal(scope["method"], scope["path"], scope["headers"])
        if refused is not None:
            await refuse(refused, send)
        elif scope["path"] in OPEN_PATHS:
            # However much there is to do: who asks would take the server for a dead one.
            await self._app(scope, receive, send)
        elif (busy := self._busy()) is not None:
            await refuse(busy, send)
        elif scope["method"] != "POST":
            await self._answer(scope, receive, send)
        else:
            await self._read(scope, receive, send)

    async def _read(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer once the body is whole. Before, the request counts as none."""
        (length,) = values(scope["headers"], b"content-length")
        try:
            body = await self._incoming.whole(receive, int(length))
        except TimeoutError:
            sentence = "the body did not come in time; send it again"
            await refuse(ApiError(408, sentence, code="request_timeout"), send)
            return
        if body is None:
            return
        if (busy := self._busy()) is not None:
            await refuse(busy, send)
        else:
            await self._answer(scope, given_again(body, receive), send)

    def _busy(self) -> ApiError | None:
        """Why no more requests are answered; None where they are."""
        if self._requests < self._access.max_requests:
            return None
        sentence = f"{self._requests} requests are being answered; ask again later"
        return ApiError(429, sentence, code="too_many_requests", headers={"retry-after": "1"})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        scope[OWNER_KEY] = self._access.owner(scope["headers"])
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1


async def refuse(refused: ApiError, send: Send) -> None:
    # A body that nobody reads would be taken for the next request.
    refused.headers["connection"] = "close"
    await respond(refused, send)
