"""Who may talk to the live page: programs of this machine that hold the token, and no other page.

A browser lets any page send requests to this machine, and lets a name of somebody else's point
here. So the token alone does not do: `Host` must be our own, and `Origin`, where there is one.
"""

import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode

from speq.errors import checked_choice

LOOPBACK = ("127.0.0.1", "::1")
# A prompt of a million tokens is about as long.
MAX_BODY_BYTES = 4 << 20
# Of every response. Styles within the page are plotly's, which writes them as it draws.
HEADERS = (
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

# As ASGI has them: names in small letters.
Headers = Iterable[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """status: of HTTP; sentence: for who asked."""

    status: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Where the page is served, and the token that it asks for.

    Raises SpeqError where the host is not this machine's own.
    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        checked_host(self.host)

    @property
    def url(self) -> str:
        """The page's address, token and all."""
        return f"http://{self._own}/?{urlencode({'token': self.token})}"

    @property
    def _own(self) -> str:
        return authority(self.host, self.port)

    @property
    def authorities(self) -> frozenset[str]:
        """What may stand in `Host`."""
        return authorities_of(self.host, self.port)

    def refusal(self, method: str, headers: Headers, query: bytes) -> Refusal | None:
        """Why a request is refused; None where it is not."""
        headers = list(headers)
        return (
            refused_host(headers, self.authorities)
            or refused_origin(headers, self.authorities)
            or refused_token(headers, query, self.token)
            or refused_body(method, headers)
        )


def authority(host: str, port: int) -> str:
    """An address and a port as URLs have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def authorities_of(host: str, port: int) -> frozenset[str]:
    """What may stand in `Host` of a request to an address of this machine's own."""
    names = {authority(host, port), f"localhost:{port}"}
    if port == 80:  # which nobody writes
        names |= {name.removesuffix(":80") for name in names}
    return frozenset(names)


def checked_host(host: str) -> str:
    """A host to listen on. Raises SpeqError for any that other machines reach."""
    return checked_choice("host", host, LOOPBACK)


def values(headers: Headers, name: bytes) -> list[str]:
    """What is given under a name, as often as it is given."""
    return [value.decode("latin-1").strip() for key, value in headers if key == name]


def refused_host(headers: Headers, authorities: frozenset[str]) -> Refusal | None:
    """Unless `Host` is given once, and is our own: else a name of somebody's leads here."""
    given = values(headers, b"host")
    if len(given) == 1 and given[0].lower() in authorities:
        return None
    return Refusal(
        421, f"the request is for {', '.join(given) or 'no host'}; open the address speq printed"
    )


def refused_origin(headers: Headers, authorities: frozenset[str]) -> Refusal | None:
    """Where `Origin` is given, and another page is the one that asks."""
    given = values(headers, b"origin")
    if all(origin.lower() in {f"http://{name}" for name in authorities} for origin in given):
        return None
    return Refusal(403, f"the request comes from {', '.join(given)}; only speq's own page may ask")


def refused_token(headers: Headers, query: bytes, token: str) -> Refusal | None:
    """Unless `Authorization: Bearer TOKEN` or `?token=TOKEN` gives the token, once."""
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("token", [])
    given += bearers(headers)
    # The comparison takes as long wherever the two begin to differ.
    if len(given) == 1 and secrets.compare_digest(given[0].encode(), token.encode()):
        return None
    what = "has no token" if not given else "has another token"
    return Refusal(401, f"the request {what}; open the address speq printed")


def bearers(headers: Headers) -> list[str]:
    """What `Authorization` gives, as often as it is given; empty where it is no bearer's."""
    given = []
    for value in values(headers, b"authorization"):
        scheme, _, rest = value.partition(" ")
        given.append(rest.strip() if scheme.lower() == "bearer" else "")
    return given


def refused_body(method: str, headers: Headers, most_bytes: int = MAX_BODY_BYTES) -> Refusal | None:
    """Unless what is posted is JSON of a length that is known and not too long.

    A form of another page cannot say that it is JSON without being asked whether it may.
    """
    if method != "POST":
        return None
    kinds = values(headers, b"content-type")
    if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        given = ", ".join(kinds) or "nothing"
        return Refusal(415, f"the content type is {given}; post application/json")
    lengths = values(headers, b"content-length")
    chunked = values(headers, b"transfer-encoding")
    if chunked or len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        return Refusal(411, "the body's length is not known; give its Content-Length")
    if len(lengths[0]) > 18 or int(lengths[0]) > most_bytes:
        return Refusal(413, f"the body is {lengths[0]:.20} bytes; {most_bytes} are taken")
    return None


def error_body(refusal: Refusal) -> bytes:
    """A refusal as JSON has it: {"error": {"message", "code"}}."""
    return json.dumps({"error": {"message": refusal.sentence, "code": refusal.status}}).encode()


class Guarded:
    """An ASGI application behind a guard: nothing of a refused request reaches it, and every
    response has `HEADERS`.
    """

    def __init__(self, app: App, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal := self._guard.refusal(
            scope["method"], scope["headers"], scope["query_string"]
        ):
            await refuse(refusal, send)
        else:
            await self._app(scope, receive, with_headers(send))


def with_headers(send: Send) -> Send:
    """`send`, with our headers in place of the application's own of the same names."""
    ours = {name for name, _ in HEADERS}

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [each for each in message.get("headers", []) if each[0].lower() not in ours]
            message = dict(message) | {"headers": [*kept, *HEADERS]}
        await send(message)

    return told


async def refuse(refusal: Refusal, send: Send) -> None:
    body = error_body(refusal)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # A body that nobody reads would be taken for the next request.
        (b"connection", b"close"),
    ]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    await with_headers(send)(start)
    await send({"type": "http.response.body", "body": body})
