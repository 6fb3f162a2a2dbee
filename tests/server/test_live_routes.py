"""The live page's address over HTTP, with a real generator behind it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from speq import Generator, SpeqError
from speq.dashboard.live.live_view import LiveView
from speq.dashboard.recording import Recording
from speq.dashboard.run_record import run_of
from speq.server.gate import PAGE_HEADERS
from speq.server.live_page import ASSETS
from speq.server.needed import check_serve
from speq.server.server import listen
from tests.helpers.api_server import JSON, NAME, QUESTION, Reply, Rig, api_server
from tests.helpers.command import PATIENCE_S, Command
from tests.helpers.live_run import PageClient, panel_of_tokens, to_the_end

TOKENS = 24


class LiveRig:
    """A server with a live page. api: what its clients ask; page: what its page does"""

    def __init__(self, api: Rig, view: LiveView) -> None:
        self.api, self.view = api, view
        self.page = PageClient(api.server)

    def complete(self, **fields: Any) -> Reply:
        asked = {"model": NAME, "prompt": "hello there", "temperature": 0}
        return self.page.post("/v1/completions", asked | {"max_tokens": TOKENS} | fields)


@contextmanager
def live_rig(generator: Generator, host: str = "127.0.0.1") -> Iterator[LiveRig]:
    with Recording(generator) as recording:
        view = LiveView(generator, recording, panel_of_tokens)
        with api_server(generator, generator, view=view, host=host) as api:
            yield LiveRig(api, view)


@pytest.fixture
def rig(generator: Generator) -> Iterator[LiveRig]:
    with live_rig(generator) as made:
        yield made


def test_a_request_of_the_page(rig: LiveRig, generator: Generator) -> None:
    none = rig.page.get("/run.json")
    assert (none.status, "nothing was generated yet" in none.error["message"]) == (404, True)
    wanted = generator.generate("hello there", max_new_tokens=TOKENS)
    with rig.page.events() as events:
        chunks = rig.complete(stream=True).chunks
        told = to_the_end(events)
    assert "".join(each["choices"][0]["text"] for each in chunks) == wanted.text
    tokens = [data for kind, data in told if kind == "token"]
    assert [each["id"] for each in tokens] == wanted.token_ids
    assert "".join(each["text"] for each in tokens) == wanted.text
    assert set(tokens[0]) == {"id", "text", "step", "origin", "waited_ms"}
    assert tokens[0]["origin"] == "prompt"
    assert {each["origin"] for each in tokens[1:]} <= {"accepted", "exact"}
    assert told[0][0] == "begun" and told[0][1]["prompt"] == "hello there"
    kind, end = told[-1]
    assert (kind, end["finish_reason"]) == ("finished", wanted.finish_reason)
    assert end["stats"]["new_tokens"] == len(wanted.token_ids)
    pictures = [data for kind, data in told if kind == "panels"]
    assert pictures[-1]["panels"][0]["table"]["rows"] == [[len(tokens)]]
    # Who comes afterwards reads the same.
    with rig.page.events() as events:
        later = to_the_end(events)
    assert [data for kind, data in later if kind == "token"] == tokens
    assert (later[0], later[-1]) == (told[0], told[-1])

    record = rig.page.get("/run.json")
    assert record.headers["content-type"] == "application/json"
    assert [each.id for each in run_of(record.json, "run.json").tokens] == wanted.token_ids
    assert b"vllm:prompt_tokens_total" in rig.page.get("/metrics").body


def test_a_request_of_another_client_is_shown(rig: LiveRig, generator: Generator) -> None:
    wanted = generator.generate(QUESTION, max_new_tokens=4)
    with rig.page.events() as events:
        rig.api.chat(max_tokens=4, temperature=0)
        told = to_the_end(events)
    assert [data["id"] for kind, data in told if kind == "token"] == wanted.token_ids
    assert told[0][1]["prompt"] == generator.tokenizer.decode(generator.encode(QUESTION))


def test_what_is_refused_is_told(rig: LiveRig) -> None:
    refused = rig.complete(prompt="a " * 600)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "the context holds 512" in refused.error["message"]


PATHS = [
    *(("GET", "/"), ("GET", "/events"), ("GET", "/metrics"), ("GET", "/run.json")),
    *(("GET", "/assets/live.js"), ("GET", "/nothing"), ("GET", "/docs"), ("GET", "/health")),
    *(("POST", "/v1/completions"), ("GET", "/v1/models")),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_who_is_refused(rig: LiveRig, method: str, path: str) -> None:
    """On every route, and on those that are not there."""
    token = rig.page.headers | {"Content-Type": JSON}
    for headers, status in (
        (token | {"Host": f"rebound.example:{rig.page.port}"}, 421),
        (token | {"Host": "127.0.0.1"}, 421),
        (token | {"Host": f"127.0.0.1:{rig.api.port}"}, 421),
        (token | {"Origin": "https://example.org"}, 403),
        (token | {"Origin": "null"}, 403),
        ({"Content-Type": JSON}, 401),
        (token | {"Authorization": "Bearer guessed"}, 401),
        (token | {"Authorization": f"Basic {rig.page.token}"}, 401),
    ):
        reply = rig.page.ask(method, path, b"{}" if method == "POST" else None, **headers)
        assert reply.status == status
        assert reply.error["message"].startswith("the request ")
        for name, value in PAGE_HEADERS:
            assert reply.headers[name.decode()] == value.decode()
    assert rig.page.ask(method, f"{path}?token=guessed", b"{}").status == 401
    assert not told_of(rig)


def told_of(rig: LiveRig) -> list[Any]:
    with rig.view.bus.subscribe(lambda: None) as subscriber:
        return rig.view.bus.take(subscriber)


def test_a_preflight_of_another_page_is_refused(rig: LiveRig) -> None:
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    reply = rig.page.ask("OPTIONS", "/v1/completions", None, **asked)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_the_page_is_at_its_own_address_alone(rig: LiveRig) -> None:
    for path in ("/events", "/run.json", "/assets/live.js"):
        assert rig.api.get(path).status == 404
    for path in ("live.html", "plotly-LICENSE", "..%2f__init__.py", "%2e%2e/__init__.py", "x.js"):
        assert rig.page.get(f"/assets/{path}").status == 404
    assert rig.page.post("/events", {}).status == 405


def test_the_page_and_its_files(rig: LiveRig) -> None:
    token = rig.page.token
    page = rig.page.ask("GET", f"/?token={token}")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert "@TOKEN@" not in text
    linked = [part.partition('"')[0] for part in text.split('="assets/')[1:]]
    assert "live.js" in [each.partition("?")[0] for each in linked]
    for each in linked:
        name, _, query = each.partition("?")
        assert query == f"token={token}"
        if (ASSETS / name).exists():
            reply = rig.page.ask("GET", f"/assets/{each}")
            assert (reply.status, reply.body) == (200, (ASSETS / name).read_bytes())
            kind = {"js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
            assert reply.headers["content-type"].startswith(kind)
    # The policy forbids both.
    assert "onclick" not in text and "<style" not in text
    assert text.count("<script") == text.count("<script defer src=")


def test_a_browser_that_leaves_leaves_nothing_behind(
    rig: LiveRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = rig.view.bus
    subscribe, left = bus.subscribe, threading.Event()

    @contextmanager
    def watched(wake: Callable[[], None]) -> Iterator[Any]:
        try:
            with subscribe(wake) as subscriber:
                yield subscriber
        finally:
            left.set()

    monkeypatch.setattr(bus, "subscribe", watched)
    before = threading.active_count()
    with rig.page.events():
        assert bus.has_subscribers
        assert threading.active_count() == before
    assert left.wait(PATIENCE_S)
    assert not bus.has_subscribers
    assert rig.complete(max_tokens=2).status == 200


def test_closing_frees_the_ports_and_sends_browsers_home(generator: Generator) -> None:
    with ExitStack() as stack:
        with live_rig(generator) as rig:
            ports = rig.api.port, rig.page.port
            with pytest.raises(SpeqError, match=f"port {ports[1]} of 127.0.0.1 cannot be listened"):
                listen("127.0.0.1", ports[1])
            events = stack.enter_context(rig.page.events())
        # The stream has ended, of itself.
        assert list(events) == []
        assert not rig.view.bus.has_subscribers
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        listen("127.0.0.1", port).close()


def test_over_ipv6(generator: Generator) -> None:
    try:
        listen("::1", 0).close()
    except SpeqError:
        pytest.skip("the machine has no ::1")
    with live_rig(generator, "::1") as rig:
        assert rig.api.server.page_url.startswith("http://[::1]:")
        assert rig.page.get("/metrics").status == 200
        assert rig.page.get("/metrics", Host=f"127.0.0.1:{rig.page.port}").status == 421


def test_the_package_is_named_where_it_is_missing() -> None:
    check_serve()
    with pytest.raises(SpeqError, match=r"by no_such_module, .*; pip install no-such-module$"):
        check_serve(("json", "no_such_module"))


def test_the_command_refuses_before_it_loads(command: Command) -> None:
    arguments = ("dashboard", "no/such/model", "--memory-budget", "1GiB")
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = command(*arguments, "--port", port)
        assert ended.code == 1
        assert f"port {port} of 127.0.0.1 cannot be listened on" in ended.err
    for host in ("0.0.0.0", "::", "localhost", "10.0.0.1"):
        ended = command(*arguments, "--host", host)
        assert (ended.code, f"host is '{host}'; it must be one of" in ended.err) == (1, True)
    assert command(*arguments, "--port", 70_000).err.startswith("error: port is 70000;")
