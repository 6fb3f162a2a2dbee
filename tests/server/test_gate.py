"""Who is let in, how much is taken, and what is told of the server itself."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speq import SpeqError
from speq.server.access import Access, Keys
from speq.server.settings import ServerSettings
from tests.helpers.api_server import JSON, NAME, Reply, Rig, api_server
from tests.helpers.command import PATIENCE_S
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, no_room, pieces

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture(scope="module")
def rig(model: ScriptedModel) -> Iterator[Rig]:
    with api_server(ScriptedEngine(pieces("a")), model, max_body=2000) as made:
        yield made


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(f"{FIRST}\n\n  {SECOND}\n")
    return Keys.read(path)


PATHS = [
    *(("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nothing")),
    *(("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize")),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_keys_are_asked_for(model: ScriptedModel, keys: Keys, method: str, path: str) -> None:
    with api_server(ScriptedEngine(pieces("a")), model, keys) as rig:
        for headers in (
            {},
            {"Authorization": "Bearer guessed"},
            {"Authorization": f"Bearer {FIRST}x"},
            {"Authorization": f"Basic {FIRST}"},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer \xe9"},
        ):
            reply = rig.ask(method, path, b"{}", **{"Content-Type": JSON} | headers)
            assert reply.status == 401
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for key in (FIRST, SECOND):
            reply = rig.ask(method, path, b"{}", Authorization=f"bearer {key}")
            assert reply.status not in (401, 403)


def test_health_needs_no_key(model: ScriptedModel, keys: Keys) -> None:
    with api_server(ScriptedEngine(pieces("a")), model, keys) as rig:
        assert rig.get("/health").json == {"status": "ok", "running": 0, "waiting": 0}
        # A key stands for its holder, whatever page it comes from.
        known = {"Authorization": f"Bearer {FIRST}", "Origin": "https://example.org"}
        assert rig.get("/v1/models", **known).status == 200


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no key"),
        ("\n \n", "holds no key"),
        (f"{FIRST}\nshort\n", ":2 is no key of 16 or more"),
        ("with a space in its midst", ":1 is no key"),
        ("schlüssel-schlüssel-schlüssel", ":1 is no key"),
    ],
)
def test_files_without_keys(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(SpeqError) as refused:
        Keys.read(path)
    assert sentence in str(refused.value)
    assert not any(line.strip() and line in str(refused.value) for line in content.splitlines())
    with pytest.raises(SpeqError, match="none"):
        Keys.read(tmp_path / "none")


def test_a_file_of_keys_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(FIRST)
    for mode in (0o644, 0o640, 0o604, 0o620, 0o610):
        path.chmod(mode)
        with pytest.raises(SpeqError, match=rf"\(its mode is {mode:04o}\).*chmod 600 .*keys`"):
            Keys.read(path)
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert Keys.read(path).hold(FIRST)
    path.chmod(0o444)
    owner = path.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)  # a file that the system gives
    assert Keys.read(path).hold(FIRST)


def test_strangers_are_refused_where_there_are_no_keys(rig: Rig) -> None:
    port = rig.port
    for headers, status in (
        ({"Host": f"rebound.example:{port}"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
    ):
        for method, path in PATHS:
            reply = rig.ask(method, path, b"{}", **{"Content-Type": JSON} | headers)
            assert reply.status == status
            assert reply.error["type"] == "invalid_request_error"
    assert rig.get("/v1/models", Host=f"localhost:{port}").status == 200
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    reply = rig.ask("OPTIONS", "/v1/chat/completions", None, **asked)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_bodies_have_bounds(rig: Rig) -> None:
    assert rig.chat(user="a" * 2000).status == 413
    plain = rig.ask("POST", "/v1/completions", b"{}", **{"Content-Type": "text/plain"})
    assert plain.status == 415
    connection = rig.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", JSON)
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_so_many_requests_are_looked_at() -> None:
    """Those over the bound are sent away before their bodies are read."""
    import asyncio

    from speq.server.gate import AccessGate

    told: list[dict[str, Any]] = []

    async def run() -> None:
        let_go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await let_go.wait()

        async def send(message: Any) -> None:
            told.append(message)

        async def receive() -> Any:
            raise AssertionError("a body was read")

        gate = AccessGate(app, Access("here", 1, None, 100), 2)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"here:1")]}
        tasks = [asyncio.ensure_future(gate(scope, receive, send)) for _ in range(2)]
        await asyncio.sleep(0)
        await gate(scope, receive, send)
        let_go.set()
        await asyncio.gather(*tasks)
        await gate(scope, receive, send)

    asyncio.run(run())
    start, _ = told
    assert start["status"] == 429
    assert dict(start["headers"])[b"retry-after"] == b"1"


class Held:
    """A scripted engine that stops before each token until it is let go."""

    def __init__(self, *texts: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.engine = ScriptedEngine(pieces(*texts), before=self._wait)

    def _wait(self, at: int) -> None:
        self.reached.set()
        assert self.go.wait(PATIENCE_S)


def in_threads(rig: Rig, count: int, replies: list[Reply], stack: ExitStack) -> None:
    for _ in range(count):
        thread = threading.Thread(target=lambda: replies.append(rig.chat()))
        thread.start()
        stack.callback(thread.join, PATIENCE_S)


def wait_for(rig: Rig, running: int, waiting: int) -> None:
    """Until the worker has so many: each look is a request, which takes its time."""
    for _ in range(10_000):
        if rig.get("/health").json == {"status": "ok", "running": running, "waiting": waiting}:
            return
    raise AssertionError(f"never were {running} under way and {waiting} waiting")


def test_the_queue_has_an_end(model: ScriptedModel) -> None:
    held = Held("a", "b")
    replies: list[Reply] = []
    with api_server(held.engine, model, max_waiting=2) as rig, ExitStack() as stack:
        in_threads(rig, 3, replies, stack)
        assert held.reached.wait(PATIENCE_S)
        wait_for(rig, 1, 2)
        for stream in (False, True):
            refused = rig.chat(stream=stream)
            assert refused.status == 429
            assert refused.error["code"] == "queue_full"
            assert refused.error["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        gauges = numbers_of(rig)
        assert gauges["vllm:num_requests_running"] == 1
        assert gauges["vllm:num_requests_waiting"] == 2
        held.go.set()
        stack.close()
        assert [reply.status for reply in replies] == [200] * 3
        gauges = numbers_of(rig)
        assert gauges["vllm:num_requests_running"] == gauges["vllm:num_requests_waiting"] == 0
        assert gauges["vllm:request_success_total"] == 3
        assert gauges["vllm:request_queue_time_seconds_count"] == 3


def numbers_of(rig: Rig) -> dict[str, float]:
    reply = rig.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def test_an_engine_that_died(model: ScriptedModel, caplog: pytest.LogCaptureFixture) -> None:
    held = Held("a", "b", "c")
    held.engine.fault, held.engine.fault_at = ZeroDivisionError("a fault of ours"), 1
    replies: list[Reply] = []
    with api_server(held.engine, model) as rig, ExitStack() as stack:
        in_threads(rig, 2, replies, stack)
        assert held.reached.wait(PATIENCE_S)
        wait_for(rig, 1, 1)
        held.go.set()
        stack.close()
        assert [reply.status for reply in replies] == [503, 503]
        assert "the engine died (ZeroDivisionError)" in replies[0].error["message"]
        health = rig.get("/health")
        assert health.status == 503
        assert "the engine died" in health.error["message"]
        assert rig.chat().status == rig.chat(stream=True).status == 503
        assert rig.get("/v1/models").status == 200
    assert "a fault of ours" in caplog.text


def test_an_engine_that_fails_at_a_request(model: ScriptedModel) -> None:
    """After a token it is the engine's fault, and the next request may do better."""
    engine = ScriptedEngine(pieces("a", "b"), fault=SpeqError("expert 7 is damaged"), fault_at=1)
    with api_server(engine, model) as rig:
        reply = rig.chat()
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert reply.error["message"] == "expert 7 is damaged"
        chunks = rig.chat(stream=True).chunks
        assert chunks[1]["choices"][0]["delta"] == {"content": "a"}
        assert chunks[2]["error"]["message"] == "expert 7 is damaged"
        assert rig.get("/health").status == 200
        engine.fault = None
        assert rig.chat().status == 200


def test_a_request_that_does_not_fit(model: ScriptedModel) -> None:
    engine = ScriptedEngine(pieces("a"), fault=no_room(), fault_at=-1)
    with api_server(engine, model) as rig:
        for stream in (False, True):
            reply = rig.chat(stream=stream)
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
            assert "more memory than there is" in reply.error["message"]
        assert numbers_of(rig)["vllm:request_success_total"] == 2


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    from speq.options.declared import build

    for given, sentence in (
        ({"host": "0.0.0.0"}, "which other machines reach, and there is no key"),
        ({"host": "::"}, "there is no key"),
        ({"host": "localhost"}, "host is 'localhost'; it must be an address"),
        ({"host": "10.0.0.1.1"}, "it must be an address"),
        ({"dashboard_port": 5}, "give --dashboard too"),
        ({"max_waiting": -1}, "max_waiting is -1"),
    ):
        with pytest.raises(SpeqError, match=sentence):
            build(ServerSettings, given)
    keys = tmp_path / "keys"
    keys.write_text(FIRST)
    assert not build(ServerSettings, {"host": "0.0.0.0", "api_key_file": keys}).loopback
    assert build(ServerSettings, {"host": "::1"}).loopback


def test_over_ipv6(model: ScriptedModel) -> None:
    try:
        with api_server(ScriptedEngine(pieces("a")), model, host="::1") as rig:
            assert rig.url.startswith("http://[::1]:")
            assert rig.get("/v1/models").json["data"][0]["id"] == NAME
    except SpeqError:
        pytest.skip("the machine has no ::1")


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
PAGE = "http://localhost:3000"
ASKED = [{"role": "user", "content": "Hello"}]


def test_pages_of_named_origins_may_ask(model: ScriptedModel, keys: Keys) -> None:
    """A browser asks first, without a key; then the page asks with one, and may read the answer."""
    engine = ScriptedEngine(pieces("a"))
    with api_server(engine, model, keys, cors=(PAGE, "app://notes")) as rig:
        asked = rig.ask("OPTIONS", "/v1/chat/completions", Origin=PAGE, **PREFLIGHT)
        assert (asked.status, asked.body) == (204, b"")
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "Authorization" in asked.headers["access-control-allow-headers"]
        assert rig.chat().status == 401
        rig.headers = {"Authorization": f"Bearer {FIRST}"}
        answer = rig.post("/v1/chat/completions", {"messages": ASKED}, Origin="app://notes")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "app://notes"
        assert answer.headers["vary"] == "Origin"
        # Refusals may be read as well, and nobody else may read anything.
        refused = rig.post("/v1/chat/completions", {}, Origin=PAGE)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)
        elsewhere = rig.ask("OPTIONS", "/v1/models", Origin="http://example.org", **PREFLIGHT)
        assert elsewhere.status == 401
        assert elsewhere.headers["access-control-allow-origin"] is None


@pytest.mark.parametrize(
    ("cors", "origin", "status"),
    [
        ((), PAGE, 403),
        ((PAGE,), "http://localhost:3001", 403),
        ((PAGE,), f"{PAGE}.example.org", 403),
        ((PAGE,), PAGE, 200),
        ((PAGE.upper(),), PAGE, 200),
        (("*",), "http://example.org", 200),
    ],
)
def test_other_pages_may_not(
    model: ScriptedModel, cors: tuple[str, ...], origin: str, status: int
) -> None:
    with api_server(ScriptedEngine(pieces("a")), model, cors=cors) as rig:
        reply = rig.get("/v1/models", Origin=origin)
        assert reply.status == status
        if status == 403:
            assert "--cors allows a page's origin" in reply.error["message"]
            assert reply.headers["access-control-allow-origin"] is None


def test_further_names_of_the_server(model: ScriptedModel) -> None:
    with api_server(ScriptedEngine(pieces("a")), model, allow_host=("Docker.internal",)) as rig:
        for host, status in (("docker.internal", 200), ("localhost", 200), ("other.internal", 421)):
            assert rig.get("/v1/models", Host=f"{host}:{rig.port}").status == status


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/nothing"])
def test_head_is_get_without_the_body(rig: Rig, path: str) -> None:
    got, told = rig.get(path), rig.ask("HEAD", path)
    assert (told.status, told.body) == (got.status, b"")
    assert told.headers["content-type"] == got.headers["content-type"]
