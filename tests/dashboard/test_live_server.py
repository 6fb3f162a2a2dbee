"""The live page's server, over HTTP, with a real generator behind it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speq import Generator, SpeqError
from speq.dashboard.live.application import ASSETS
from speq.dashboard.live.guard import HEADERS, MAX_BODY_BYTES
from speq.dashboard.live.metrics import Metrics
from speq.dashboard.live.needed import check_serve
from speq.dashboard.live.server import LiveServer, bound
from speq.dashboard.live.session import Session
from speq.dashboard.run_record import run_of
from tests.helpers.command import PATIENCE_S, Command
from tests.helpers.live_run import (
    Answer,
    Browser,
    OfGenerator,
    panel_of_tokens,
    served,
    to_the_end,
)

TOKENS = 24


@pytest.fixture(scope="module")
def generator(tiny: Callable[[str], Path]) -> Iterator[Generator]:
    made = Generator.from_pretrained(
        tiny("qwen3_moe"), "1MiB", draft_length=3, reader_threads=2, context_length=96
    )
    yield made
    made.close()


class Rig:
    """A server with all that is behind it. recording.before: called before each token is told."""

    def __init__(self, generator: Generator, host: str = "127.0.0.1") -> None:
        self.recording = OfGenerator(generator)
        self.metrics = Metrics("tiny")
        self.session = Session(self.recording, panel_of_tokens, self.metrics)
        self.server = LiveServer(self.session, self.metrics, bound(host))
        self.browser = Browser(self.server)

    def generate(self, **sampling: Any) -> Answer:
        asked = {"prompt": "hello there", "max_new_tokens": TOKENS, "ignore_eos": True}
        return self.browser.post("/generate", asked | sampling)


@contextmanager
def rig_of(generator: Generator, host: str = "127.0.0.1") -> Iterator[Rig]:
    rig = Rig(generator, host)
    with (
        rig.metrics.listening(generator.runtime.recorder),
        closing(rig.session),
        served(rig.server),
    ):
        yield rig


@pytest.fixture
def rig(generator: Generator) -> Iterator[Rig]:
    with rig_of(generator) as made:
        yield made


def test_a_generation(rig: Rig, generator: Generator) -> None:
    with rig.browser.events() as events:
        asked = rig.generate()
        assert (asked.status, asked.json) == (202, {"run": 1})
        told = to_the_end(events)
    rig.session.wait()
    tokens = [data for kind, data in told if kind == "token"]
    wanted = generator.generate("hello there", max_new_tokens=TOKENS, ignore_eos=True)
    assert [each["id"] for each in tokens] == wanted.token_ids
    assert "".join(each["text"] for each in tokens) == wanted.text
    assert set(tokens[0]) == {"id", "text", "step", "origin", "waited_ms"}
    assert told[0][0] == "begun" and told[0][1]["prompt"] == "hello there"
    kind, end = told[-1]
    assert (kind, end["finish_reason"]) == ("finished", "length")
    assert end["stats"]["new_tokens"] == TOKENS
    pictures = [data for kind, data in told if kind == "panels"]
    assert pictures[-1]["panels"][0]["table"]["rows"] == [[TOKENS]]
    # Who comes afterwards hears the same.
    with rig.browser.events() as events:
        later = to_the_end(events)
    assert [each for each in later if each[0] != "prompt"][:1] == told[:1]
    assert [data for kind, data in later if kind == "token"] == tokens
    assert later[-1] == told[-1]

    record = rig.browser.get("/run.json")
    assert record.headers["content-type"] == "application/json"
    read = run_of(record.json, "run.json")
    assert [each.id for each in read.tokens] == wanted.token_ids[: len(read.tokens)]
    assert read.stats["new_tokens"] == TOKENS


def test_metrics_of_what_was_generated(rig: Rig, generator: Generator) -> None:
    with rig.browser.events() as events:
        rig.generate()
        told = to_the_end(events)
    answer = rig.browser.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    read = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if sample.labels.get("phase") != "prefill"
    }
    stats = told[-1][1]["stats"]
    assert read["vllm:generation_tokens_total"] == TOKENS
    assert read["vllm:prompt_tokens_total"] == len(generator.encode("hello there"))
    assert read["vllm:request_success_total"] == 1
    assert read["vllm:num_requests_running"] == 0
    assert read["speq:moved_bytes_total"] == stats["moved_bytes"]
    assert rig.browser.get(f"/metrics?token={rig.server.guard.token}").status == 401  # twice


PATHS = [
    *(("GET", "/"), ("GET", "/events"), ("GET", "/metrics"), ("GET", "/run.json")),
    *(("GET", "/assets/live.js"), ("GET", "/nothing"), ("GET", "/docs"), ("GET", "/openapi.json")),
    *(("POST", "/generate"), ("POST", "/stop")),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_who_is_refused(rig: Rig, method: str, path: str) -> None:
    """On every route, and on those that are not there."""
    token = rig.browser.token | {"Content-Type": "application/json"}
    port = rig.server.guard.port
    for headers, status in (
        (token | {"Host": f"rebound.example:{port}"}, 421),
        (token | {"Host": "127.0.0.1"}, 421),
        (token | {"Origin": "https://example.org"}, 403),
        (token | {"Origin": "null"}, 403),
        ({"Content-Type": "application/json"}, 401),
        (token | {"Authorization": "Bearer guessed"}, 401),
        (token | {"Authorization": f"Basic {rig.server.guard.token}"}, 401),
    ):
        answer = rig.browser.ask(method, path, b"{}" if method == "POST" else None, headers)
        assert answer.status == status
        assert answer.sentence.startswith("the request ")
        for name, value in HEADERS:
            assert answer.headers[name.decode()] == value.decode()
    assert rig.browser.ask(method, f"{path}?token=guessed", b"{}", {}).status == 401
    assert not rig.session.running


def test_a_preflight_of_another_page_is_refused(rig: Rig) -> None:
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = rig.browser.ask("OPTIONS", "/generate", None, asked)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    ("body", "headers", "status", "sentence"),
    [
        (b"{", {}, 400, "the body is no JSON"),
        (b"\xff", {}, 400, "the body is no JSON"),
        (b"[" * 100_000, {}, 400, "the body is no JSON"),
        (b"[]", {}, 400, "the body is no object"),
        (b"{}", {}, 400, "prompt is None"),
        (b'{"prompt": 1}', {}, 400, "prompt is 1; it must be a text"),
        (b'{"prompt": "a", "self": 1}', {}, 400, "unknown option self"),
        (b'{"prompt": "a", "max_new_tokens": "many"}', {}, 400, "max_new_tokens is 'many'"),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 415, "post application/json"),
        (b'{"prompt": "a"}', {"Content-Length": str(MAX_BODY_BYTES + 1)}, 413, "are taken"),
    ],
    ids=lambda given: repr(given)[:30],
)
def test_bad_posts(
    rig: Rig, body: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    answer = rig.browser.post("/generate", body, **headers)
    assert answer.status == status
    assert sentence in answer.sentence
    assert not rig.session.running


def test_what_only_the_generator_refuses(rig: Rig) -> None:
    with rig.browser.events() as events:
        assert rig.generate(max_new_tokens=10_000).status == 202
        kind, data = to_the_end(events)[-1]
    assert kind == "failed"
    assert "96" in data["error"]


def test_routes_that_are_not_there(rig: Rig) -> None:
    get, post = rig.browser.get, rig.browser.post
    assert (get("/nothing").status, get("/nothing").sentence) == (404, "Not Found")
    assert get("/docs").status == get("/openapi.json").status == 404
    for path in ("live.html", "plotly-LICENSE", "..%2f__init__.py", "%2e%2e/__init__.py", "x.js"):
        assert get(f"/assets/{path}").status == 404
    assert get("/generate").status == 405
    assert post("/events", {}).status == 405
    none = get("/run.json")
    assert (none.status, none.sentence.partition(";")[0]) == (404, "nothing was generated yet")


def test_the_page_and_its_files(rig: Rig) -> None:
    token = rig.server.guard.token
    page = rig.browser.ask("GET", f"/?token={token}", None, {})
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
            answer = rig.browser.ask("GET", f"/assets/{each}", None, {})
            assert (answer.status, answer.body) == (200, (ASSETS / name).read_bytes())
            kind = {"js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
            assert answer.headers["content-type"].startswith(kind)
    # The policy forbids both.
    assert "onclick" not in text and "<style" not in text
    assert text.count("<script") == text.count("<script defer src=")


def test_one_generation_at_a_time_and_stop(rig: Rig) -> None:
    """The thread that generates asks the server itself, so that it is known when."""
    at_most = 5
    answers: list[Answer] = []

    def ask(at: int) -> None:
        if at == at_most:
            answers.append(rig.generate())
            answers.append(rig.browser.post("/stop", {}))

    rig.recording.before = ask
    with rig.browser.events() as events:
        assert rig.generate(max_new_tokens=64).status == 202
        told = to_the_end(events)
    second, stop = answers
    assert second.status == 409
    assert "a generation runs already" in second.sentence
    assert (stop.status, stop.json) == (200, {"stopping": True})
    assert sum(kind == "token" for kind, _ in told) == at_most + 1
    assert told[-1][0] == "finished"
    assert told[-1][1]["finish_reason"] == "stopped"
    rig.session.wait()
    assert rig.browser.post("/stop", {}).json == {"stopping": False}
    # The generator is ready for the next one.
    rig.recording.before = lambda at: None
    with rig.browser.events() as events:
        to_the_end(events)  # the one that was stopped
        assert rig.generate().json == {"run": 2}
        assert to_the_end(events)[-1][1]["stats"]["new_tokens"] == TOKENS


def test_stop_within_a_prompt_leaves_the_generator_sound(rig: Rig, generator: Generator) -> None:
    wanted = generator.generate("hello there", max_new_tokens=TOKENS, ignore_eos=True)
    stopped: list[int] = []
    newest = rig.session.broadcast.newest

    def stop(kind: str, data: dict[str, Any]) -> None:
        newest(kind, data)
        if kind == "prompt" and not stopped:
            stopped.append(data["done"])
            rig.session.stop()

    with pytest.MonkeyPatch.context() as patch, rig.browser.events() as events:
        patch.setattr(rig.session.broadcast, "newest", stop)
        rig.generate()
        told = to_the_end(events)
    assert len(stopped) == 1
    assert not [kind for kind, _ in told if kind == "token"]
    assert told[-1] == ("finished", {"finish_reason": "stopped", "stats": None})
    again = generator.generate("hello there", max_new_tokens=TOKENS, ignore_eos=True)
    assert again.token_ids == wanted.token_ids


def test_a_browser_that_leaves_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = rig.session.broadcast
    listening = broadcast.listening
    left = threading.Event()

    @contextmanager
    def watched(wake: Callable[[], None]) -> Iterator[Any]:
        try:
            with listening(wake) as listener:
                yield listener
        finally:
            left.set()

    monkeypatch.setattr(broadcast, "listening", watched)
    before = threading.active_count()
    with rig.browser.events():
        assert broadcast.heard
        assert threading.active_count() == before
    assert left.wait(PATIENCE_S)
    assert not broadcast.heard
    assert threading.active_count() == before
    assert rig.generate().status == 202
    rig.session.wait()


def test_closing_frees_the_port_and_sends_browsers_home(generator: Generator) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        with rig_of(generator) as rig:
            port = rig.server.guard.port
            with pytest.raises(SpeqError, match=f"port {port} of 127.0.0.1 cannot be listened on"):
                bound("127.0.0.1", port)
            events = stack.enter_context(rig.browser.events())
        # The stream has ended, of itself.
        assert list(events) == []
        assert not rig.session.broadcast.heard
    assert threading.active_count() == before
    bound("127.0.0.1", port).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def test_over_ipv6(generator: Generator) -> None:
    try:
        bound("::1").close()
    except SpeqError:
        pytest.skip("the machine has no ::1")
    with rig_of(generator, "::1") as rig:
        assert rig.server.url.startswith("http://[::1]:")
        assert rig.browser.get("/metrics").status == 200
        other = {"Host": f"127.0.0.1:{rig.server.guard.port}"}
        assert rig.browser.get("/metrics", **other).status == 421


def test_only_this_machine_is_listened_on() -> None:
    for host in ("0.0.0.0", "::", "localhost", "10.0.0.1"):
        with pytest.raises(SpeqError, match="it must be one of 127"):
            bound(host)


def test_the_package_is_named_where_it_is_missing() -> None:
    check_serve()
    with pytest.raises(SpeqError, match=r"by no_such_module, .*; pip install no-such-module$"):
        check_serve(("json", "no_such_module"))


def test_the_command_refuses_before_it_loads(command: Command) -> None:
    arguments = ("dashboard", "no/such/model", "--memory-budget", "1GiB")
    with closing(bound()) as taken:
        port = taken.getsockname()[1]
        ended = command(*arguments, "--port", port)
        assert ended.code == 1
        assert f"port {port} of 127.0.0.1 cannot be listened on" in ended.err
    ended = command(*arguments, "--host", "0.0.0.0")
    assert (ended.code, "host is '0.0.0.0'; it must be one of" in ended.err) == (1, True)
    assert command(*arguments, "--port", 70_000).err.startswith("error: port is 70000;")
