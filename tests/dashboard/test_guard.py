"""Who may talk to the live page, decided from headers alone."""

import asyncio
import json
from typing import Any

import pytest

from speq import SpeqError
from speq.dashboard.live.guard import HEADERS, MAX_BODY_BYTES, Guard, Guarded, Message

TOKEN = "s3cret-Token_0"
GUARD = Guard("127.0.0.1", 4711, TOKEN)
HOST = (b"host", b"127.0.0.1:4711")
BEARER = (b"authorization", b"Bearer s3cret-Token_0")
JSON = (b"content-type", b"application/json")
Header = tuple[bytes, bytes]


def status(
    *headers: Header, guard: Guard = GUARD, method: str = "GET", query: bytes = b""
) -> int | None:
    """Of the refusal; None: taken."""
    refusal = guard.refusal(method, headers, query)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("guard", "host", "wanted"),
    [
        (GUARD, b"127.0.0.1:4711", None),
        (GUARD, b"localhost:4711", None),
        (GUARD, b"LocalHost:4711", None),
        (GUARD, b"127.0.0.1:4712", 421),
        (GUARD, b"127.0.0.1", 421),
        (GUARD, b"[::1]:4711", 421),
        (GUARD, b"0.0.0.0:4711", 421),
        (GUARD, b"rebound.example:4711", 421),
        (GUARD, b"localhost.example:4711", 421),
        (GUARD, b"localhost:4711@example", 421),
        (GUARD, b"", 421),
        (Guard("::1", 4711, TOKEN), b"[::1]:4711", None),
        (Guard("::1", 4711, TOKEN), b"127.0.0.1:4711", 421),
        (Guard("127.0.0.1", 80, TOKEN), b"localhost", None),
        (Guard("127.0.0.1", 80, TOKEN), b"127.0.0.1:80", None),
    ],
)
def test_only_our_own_host(guard: Guard, host: bytes, wanted: int | None) -> None:
    assert status((b"host", host), BEARER, guard=guard) == wanted


def test_a_host_is_given_once() -> None:
    assert status(BEARER) == 421
    assert status(HOST, HOST, BEARER) == 421
    assert status(HOST, (b"host", b"rebound.example"), BEARER) == 421


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (b"http://127.0.0.1:4711", None),
        (b"http://localhost:4711", None),
        (b"https://127.0.0.1:4711", 403),
        (b"http://127.0.0.1:4712", 403),
        (b"http://127.0.0.1", 403),
        (b"https://example.org", 403),
        (b"null", 403),
        (b"", 403),
    ],
)
def test_only_our_own_origin(origin: bytes, wanted: int | None) -> None:
    assert status(HOST, BEARER, (b"origin", origin)) == wanted


@pytest.mark.parametrize(
    ("headers", "query", "wanted"),
    [
        ([BEARER], b"", None),
        ([], b"token=s3cret-Token_0", None),
        ([], b"a=b&token=s3cret-Token_0", None),
        ([(b"authorization", b"bearer  s3cret-Token_0")], b"", None),
        ([], b"", 401),
        ([], b"token=", 401),
        ([], b"token", 401),
        ([], b"token=s3cret-Token_", 401),
        ([], b"token=s3cret-Token_00", 401),
        ([], b"Token=s3cret-Token_0", 401),
        ([], b"token=%ff%fe", 401),
        ([], "token=s3cret-Tökén_0".encode(), 401),
        ([(b"authorization", b"Basic s3cret-Token_0")], b"", 401),
        ([(b"authorization", b"s3cret-Token_0")], b"", 401),
        ([(b"cookie", b"token=s3cret-Token_0")], b"", 401),
        # One right and one wrong: who guesses may not try two at a time.
        ([], b"token=s3cret-Token_0&token=other", 401),
        ([BEARER], b"token=other", 401),
    ],
)
def test_only_with_the_token(headers: list[Header], query: bytes, wanted: int | None) -> None:
    assert status(HOST, *headers, query=query) == wanted


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([JSON, (b"content-length", b"12")], None),
        ([JSON, (b"content-length", str(MAX_BODY_BYTES).encode())], None),
        ([(b"content-type", b"Application/JSON; charset=utf-8"), (b"content-length", b"1")], None),
        ([JSON, (b"content-length", str(MAX_BODY_BYTES + 1).encode())], 413),
        ([JSON, (b"content-length", b"9" * 5000)], 413),
        ([JSON], 411),
        ([JSON, (b"content-length", b"-1")], 411),
        ([JSON, (b"content-length", "²".encode("latin-1"))], 411),
        ([JSON, (b"content-length", b"1"), (b"content-length", b"2")], 411),
        ([JSON, (b"content-length", b"1"), (b"transfer-encoding", b"chunked")], 411),
        ([(b"content-length", b"1")], 415),
        ([(b"content-type", b"text/plain"), (b"content-length", b"1")], 415),
        ([(b"content-type", b"text/plain; application/json"), (b"content-length", b"1")], 415),
        ([JSON, (b"content-type", b"text/plain"), (b"content-length", b"1")], 415),
    ],
)
def test_only_json_of_a_known_length_is_posted(headers: list[Header], wanted: int | None) -> None:
    assert status(HOST, BEARER, *headers, method="POST") == wanted


def test_who_may_not_ask_learns_nothing_of_the_token() -> None:
    """A page elsewhere gets the same answer whether or not it has guessed the token."""
    foreign = (b"origin", b"https://example.org")
    assert status(HOST, foreign) == status(HOST, foreign, BEARER) == 403
    assert TOKEN not in repr(GUARD)


def test_the_address() -> None:
    assert GUARD.url == "http://127.0.0.1:4711/?token=s3cret-Token_0"
    assert Guard("::1", 4711, TOKEN).url == "http://[::1]:4711/?token=s3cret-Token_0"
    made = {Guard("127.0.0.1", 1).token for _ in range(8)}
    assert len(made) == 8 and min(map(len, made)) >= 32
    for host in ("0.0.0.0", "::", "localhost", "192.168.0.1", ""):
        with pytest.raises(SpeqError, match=r"host is '.*'; it must be one of 127\.0\.0\.1, ::1"):
            Guard(host, 4711)


def answered(scope: Message) -> tuple[list[Message], list[Message]]:
    """What a guarded application sends, and the scopes that reached it."""
    sent: list[Message] = []
    reached: list[Message] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        reached.append(scope)
        headers = [(b"Cache-Control", b"max-age=9"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    async def receive() -> Message:
        raise AssertionError("nothing is read of a request")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Guarded(app, GUARD)(scope, receive, send))
    return sent, reached


def scope_of(*headers: Header, method: str = "GET") -> Message:
    return {"type": "http", "method": method, "headers": list(headers), "query_string": b""}


def test_every_response_has_our_headers() -> None:
    wanted = dict(HEADERS)
    (start, body), reached = answered(scope_of(HOST, BEARER))
    assert len(reached) == 1
    assert (start["status"], body["body"]) == (200, b"hello")
    # Ours stand in place of the application's own.
    assert sorted(start["headers"]) == sorted([*HEADERS, (b"content-type", b"text/plain")])
    (start, body), reached = answered(scope_of(HOST))
    assert reached == [] and start["status"] == 401
    assert wanted.items() <= dict(start["headers"]).items()
    error = json.loads(body["body"])["error"]
    assert error == {
        "message": "the request has no token; open the address speq printed",
        "code": 401,
    }
    assert wanted[b"x-content-type-options"] == b"nosniff"
    assert wanted[b"referrer-policy"] == b"no-referrer"
    assert wanted[b"cache-control"] == b"no-store"
    policy = wanted[b"content-security-policy"].decode()
    assert policy.startswith("default-src 'none'; script-src 'self';") and "eval" not in policy


def test_nothing_but_http_goes_through() -> None:
    sent, reached = answered({"type": "websocket", "headers": [HOST, BEARER]})
    assert reached == [] and sent == [{"type": "websocket.close", "code": 1008}]
