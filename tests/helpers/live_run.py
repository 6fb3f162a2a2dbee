"""What the live page generates with: a script, or a generator; and what it says over HTTP."""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import speq
from speq.dashboard.live.server import LiveServer
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import Residency, RunRecord, TokenRecord
from speq.units import Progress
from tests.helpers.command import PATIENCE_S


def record_of(tokens: list[TokenRecord], stats: dict[str, Any], prompt_tokens: int) -> RunRecord:
    return RunRecord(
        model="tiny",
        version="0",
        commit=None,
        machine={},
        device="cpu",
        link="disk",
        options={},
        sampling={},
        prompt_tokens=prompt_tokens,
        layers=2,
        experts=4,
        memory={},
        planned=None,
        expected=None,
        stats=stats,
        tokens=tokens,
        steps=[],
        left_out=0,
        residency=Residency([], [], []),
        cycles=[],
    )


def panel_of_tokens(record: RunRecord) -> list[Panel]:
    """A picture whose only number is that of the tokens so far."""
    table = Table(("tokens",), [[len(record.tokens)]])
    return [Panel("tokens", "Tokens", "Read the number.", [], {}, table)]


# Of scripted runs, beside their tokens.
STATS: dict[str, Any] = {"cached_tokens": 2, "ttft_ms": 250.0}


@dataclass
class Scripted:
    """A recording that yields these tokens. `before` is called with each one's place first, and
    with that of the end, by the thread that generates; `before_prompt` with 1 and 2.
    """

    tokens: list[TokenRecord]
    prompt_tokens: int = 3
    before: Callable[[int], None] = lambda at: None
    before_prompt: Callable[[int], None] = lambda done: None
    so_far: list[TokenRecord] = field(default_factory=list)
    begun: bool = False
    closed: int = 0

    def stream(
        self,
        prompt: str,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Generator[TokenRecord, None, None]:
        assert on_finish is not None and progress is not None
        self.begun, self.so_far = True, []
        try:
            for done in range(1, 3):
                self.before_prompt(done)
                progress("running the prompt", done, 2)
            for at, token in enumerate(self.tokens):
                self.before(at)
                self.so_far.append(token)
                yield token
            self.before(len(self.tokens))
            on_finish("length", {})
        finally:
            self.closed += 1

    def record(self) -> RunRecord | None:
        if not self.begun:
            return None
        stats = STATS | {"new_tokens": len(self.so_far)}
        return record_of(list(self.so_far), stats, self.prompt_tokens)


class OfGenerator:
    """A recording of a generator's runs, with nothing of their steps. `before`: as `Scripted`."""

    def __init__(self, generator: speq.Generator) -> None:
        self._generator = generator
        self._tokens: list[TokenRecord] = []
        self._prompt_tokens: int | None = None
        self.before: Callable[[int], None] = lambda at: None

    def stream(
        self,
        prompt: str,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Generator[TokenRecord, None, None]:
        self._tokens = []
        self._prompt_tokens = len(self._generator.encode(prompt))
        stream = self._generator.stream(prompt, on_finish=on_finish, progress=progress, **sampling)
        with contextlib.closing(stream):
            for at, token in enumerate(stream):
                self.before(at)
                self._tokens.append(TokenRecord(token.id, token.text, at, "exact", 0.0))
                yield self._tokens[-1]

    def record(self) -> RunRecord | None:
        run = self._generator.last_run
        if run is None or self._prompt_tokens is None:
            return None
        return record_of(list(self._tokens), run.summary(), self._prompt_tokens)


@contextmanager
def served(server: LiveServer) -> Iterator[None]:
    """Serve in a thread for as long as the block lasts."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def sentence(self) -> str:
        """Why it was refused."""
        assert self.json["error"]["code"] == self.status
        return str(self.json["error"]["message"])


@dataclass(frozen=True)
class Browser:
    """Requests to a server, as its own page makes them."""

    server: LiveServer

    @property
    def token(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.server.guard.token}"}

    def connect(self) -> http.client.HTTPConnection:
        guard = self.server.guard
        return http.client.HTTPConnection(guard.host, guard.port, timeout=PATIENCE_S)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, self.token | headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.ask(
            "POST", path, body, self.token | {"Content-Type": "application/json"} | headers
        )

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """The events of the server, from now on and as they come: (kind, data)."""
        connection = self.connect()
        connection.request("GET", f"/events?token={self.server.guard.token}")
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        try:
            yield parsed(iter(response.readline, b""))
        finally:
            response.close()
            connection.close()


def parsed(lines: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """Server-sent events, as https://html.spec.whatwg.org has them: lines up to an empty one."""
    kind, data = "", ""
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data += value
        elif line == b"\n" and kind:
            yield kind, json.loads(data)
            kind, data = "", ""


def to_the_end(events: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Events up to the first that ends a generation."""
    found = []
    for kind, data in events:
        found.append((kind, data))
        if kind in ("finished", "failed"):
            break
    return found
