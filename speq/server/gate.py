"""The gate before the application: nothing of a refused request reaches it."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speq.server.access import OPEN_PATHS, Access, values
from speq.server.answer import respond
from speq.server.api_error import ApiError
from speq.server.incoming import Incoming, given_again

Headers = Sequence[tuple[bytes, bytes]]
# Of bodies on their way: so many of the longest, and some short ones.
BODIES, BODIES_BYTES = 4, 16 << 20
# Of a request's scope: who asks, where there are several keys.
OWNER_KEY = "speq.owner"
# Of every response of the page. Styles within it are plotly's, which writes them as it draws.
PAGE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class AccessGate:
    """An ASGI application behind `Access`. It sees bodies that are whole, and no others.

    max_requests  are looked at or answered at a time, which bounds the memory that bodies take
    """

    def __init__(self, app: ASGIApp, access: Access, max_requests: int) -> None:
        self._app, self._access, self._max_requests = app, access, max_requests
        self._incoming = Incoming(access.max_body_bytes * BODIES + BODIES_BYTES)
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        if scope["method"] == "HEAD":
            scope = dict(scope) | {"method": "GET"}  # the server leaves the body out
        if self._access.page:
            send = with_headers(send, PAGE_HEADERS)
        origin = self._access.shared_with(scope)
        if origin is not None:
            named = (b"access-control-allow-origin", origin.encode("latin-1"))
            send = with_headers(send, (named, (b"vary", b"Origin")))
            if scope["method"] == "OPTIONS" and values(scope, b"access-control-request-method"):
                # Before keys are looked at: browsers ask without any whether they may send one.
                await allow(send)
                return
        refused = self._access.refusal(scope)
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

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer once the body is whole. Before, the request counts as none."""
        (length,) = values(scope, b"content-length")
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
        if self._requests < self._max_requests:
            return None
        sentence = f"{self._requests} requests are being answered; ask again later"
        return ApiError(429, sentence, code="too_many_requests", headers={"retry-after": "1"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[OWNER_KEY] = self._access.owner(scope)
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1


async def refuse(refused: ApiError, send: Send) -> None:
    # A body that nobody reads would be taken for the next request.
    refused.headers["connection"] = "close"
    await respond(refused, send)


async def allow(send: Send) -> None:
    """Tell a browser that a page may ask."""
    headers = [
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-allow-headers", b"*, Authorization"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def with_headers(send: Send, headers: Headers) -> Send:
    """`send`, with our headers in place of the application's own of the same names."""
    ours = {name for name, _ in headers}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [each for each in message.get("headers", []) if each[0].lower() not in ours]
            message = dict(message) | {"headers": [*kept, *headers]}
        await send(message)

    return send_with_headers
