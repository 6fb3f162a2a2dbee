"""Who may ask, decided from headers alone: as a live page that has a token, which checks most."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message, Scope

from speq.server.access import Access, Keys, digest
from speq.server.gate import PAGE_HEADERS, AccessGate

TOKEN = "s3cret-Token_0"
MOST_BYTES = 1000
HOST = (b"host", b"127.0.0.1:4711")
BEARER = (b"authorization", b"Bearer s3cret-Token_0")
JSON = (b"content-type", b"application/json")
Header = tuple[bytes, bytes]


def page(host: str = "127.0.0.1", port: int = 4711) -> Access:
    return Access(host, port, Keys((digest(TOKEN),)), MOST_BYTES, page=True)


PAGE = page()


def scope_of(
    headers: Iterable[Header], method: str = "GET", path: str = "/v1/models", query: bytes = b""
) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*headers],
        "query_string": query,
    }


def status(*headers: Header, access: Access = PAGE, **given: Any) -> int | None:
    """Of the refusal; None: taken."""
    refusal = access.refusal(scope_of(headers, **given))
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("access", "host", "wanted"),
    [
        (PAGE, b"127.0.0.1:4711", None),
        (PAGE, b"localhost:4711", None),
        (PAGE, b"LocalHost:4711", None),
        (PAGE, b"127.0.0.1:4712", 421),
        (PAGE, b"127.0.0.1", 421),
        (PAGE, b"[::1]:4711", 421),
        (PAGE, b"0.0.0.0:4711", 421),
        (PAGE, b"rebound.example:4711", 421),
        (PAGE, b"localhost.example:4711", 421),
        (PAGE, b"localhost:4711@example", 421),
        (PAGE, b"", 421),
        (page("::1"), b"[::1]:4711", None),
        (page("::1"), b"127.0.0.1:4711", 421),
        (page(port=80), b"localhost", None),
        (page(port=80), b"127.0.0.1:80", None),
    ],
)
def test_only_our_own_host(access: Access, host: bytes, wanted: int | None) -> None:
    assert status((b"host", host), BEARER, access=access) == wanted


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
        ([JSON, (b"content-length", str(MOST_BYTES).encode())], None),
        ([(b"content-type", b"Application/JSON; charset=utf-8"), (b"content-length", b"1")], None),
        ([JSON, (b"content-length", str(MOST_BYTES + 1).encode())], 413),
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
    # Whoever asks for health too: a page elsewhere must not learn that speq runs.
    assert status(HOST, path="/health") == 401
    assert TOKEN not in repr(PAGE)


def test_keys_alone_do_where_there_is_no_page() -> None:
    access = Access("0.0.0.0", 4711, Keys((digest(TOKEN), digest("another"))), MOST_BYTES)
    elsewhere = (b"host", b"speq.example"), (b"origin", b"https://example.org")
    assert status(*elsewhere, BEARER, access=access) is None
    assert status(*elsewhere, access=access) == 401
    assert status(*elsewhere, access=access, path="/health") is None
    # The chat page asks for a key itself.
    assert status(*elsewhere, access=access, path="/") is None
    assert status(*elsewhere, access=access, path="/assets/chat.js") is None
    assert status(*elsewhere, access=access, path="/assets/page.js") == 401
    assert status(HOST, path="/") == 401
    # Keys do not stand in addresses there.
    assert status(access=access, query=b"token=s3cret-Token_0") == 401
    # Each holder has prefixes of its own.
    other = (b"authorization", b"Bearer another")
    assert access.owner(scope_of([BEARER])) != access.owner(scope_of([other])) != ""
    assert PAGE.owner(scope_of([BEARER])) == ""


def test_what_changes_the_server_has_keys_of_its_own() -> None:
    path = "/v1/speq/resize"
    post = {"method": "POST", "path": path}
    body = JSON, (b"content-length", b"2")
    admin = (b"authorization", b"Bearer an-admin")
    own = Keys((digest("an-admin"),))
    for keys in (None, Keys((digest(TOKEN),))):
        shut = Access("127.0.0.1", 4711, keys, MOST_BYTES)
        assert status(HOST, BEARER, *body, access=shut, **post) == 403
        assert status(HOST, *body, access=shut, **post) == 403
        access = Access("127.0.0.1", 4711, keys, MOST_BYTES, admin_keys=own)
        assert status(HOST, admin, *body, access=access, **post) is None
        assert status(HOST, BEARER, *body, access=access, **post) == 401
        assert status(HOST, *body, access=access, **post) == 401
        assert status(HOST, BEARER, admin, *body, access=access, **post) == 401
        # It opens nothing else.
        assert status(HOST, admin, access=access) == (401 if keys else None)
    foreign = (b"origin", b"https://example.org")
    assert status(HOST, admin, foreign, *body, access=replace(access, keys=None), **post) == 403


def answered(scope: Scope) -> tuple[list[Message], list[Scope]]:
    """What an application behind the gate sends, and the scopes that reached it."""
    sent: list[Message] = []
    reached: list[Scope] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        reached.append(scope)
        headers = [(b"Cache-Control", b"max-age=9"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    async def receive() -> Message:
        raise AssertionError("nothing is read of a request")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(AccessGate(app, PAGE, 9)(scope, receive, send))
    return sent, reached


def test_every_response_of_the_page_has_our_headers() -> None:
    wanted = dict(PAGE_HEADERS)
    (start, body), reached = answered(scope_of([HOST, BEARER]))
    assert len(reached) == 1
    assert (start["status"], body["body"]) == (200, b"hello")
    # Ours stand in place of the application's own.
    assert sorted(start["headers"]) == sorted([*PAGE_HEADERS, (b"content-type", b"text/plain")])
    (start, body), reached = answered(scope_of([HOST]))
    assert reached == [] and start["status"] == 401
    assert wanted.items() <= dict(start["headers"]).items()
    assert b"the request has no key; open the address speq printed" in body["body"]
    assert wanted[b"x-content-type-options"] == b"nosniff"
    assert wanted[b"referrer-policy"] == b"no-referrer"
    assert wanted[b"cache-control"] == b"no-store"
    policy = wanted[b"content-security-policy"].decode()
    assert policy.startswith("default-src 'none'; script-src 'self';") and "eval" not in policy


def test_nothing_but_http_goes_through() -> None:
    sent, reached = answered({"type": "websocket", "headers": [HOST, BEARER]})
    assert reached == [] and sent == [{"type": "websocket.close", "code": 1008}]
