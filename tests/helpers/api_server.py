"""The server within this process, and a client that says no more than HTTP does."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from speq.dashboard.live.live_view import LiveView
from speq.engine.engine_thread import BatchEngine, EngineThread, Observer
from speq.server.access import Access, Keys
from speq.server.metrics import Metrics
from speq.server.server import ApiServer, ServedModel, listen
from speq.server.service import Service
from speq.server.settings import ServerSettings
from tests.helpers.command import PATIENCE_S

NAME = "tiny"
QUESTION = [{"role": "user", "content": "Hello there"}]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    @property
    def chunks(self) -> list[Any]:
        """Of server-sent events, up to the one that ends them."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame]
        told = [frame for frame in frames if not frame.startswith(":")]
        assert all(frame.startswith("data: ") for frame in told)
        assert told[-1] == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in told[:-1]]


class Client:
    """Requests to one address, each with these headers beside its own."""

    def __init__(self, access: Access, headers: dict[str, str] | None = None) -> None:
        self.access, self.headers = access, headers or {}

    @property
    def port(self) -> int:
        return self.access.port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.access.host, self.port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, **self.headers | headers)

    def post(self, path: str, content: Any, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"} | self.headers | headers
        return self.ask("POST", path, body, **headers)

    def chat(self, **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"model": NAME, "messages": QUESTION} | fields)

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": NAME, "prompt": "Hello there"} | fields)

    @contextmanager
    def streaming(self, **fields: Any) -> Iterator[http.client.HTTPResponse]:
        """A chat whose answer comes in chunks; the client leaves where the block ends."""
        asked = {"model": NAME, "messages": QUESTION, "stream": True} | fields
        connection = self.connect()
        body = json.dumps(asked).encode()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": JSON})
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()


class Rig(Client):
    """A server that runs, with what is behind it."""

    def __init__(
        self, server: ApiServer, worker: EngineThread, metrics: Metrics, thread: threading.Thread
    ) -> None:
        super().__init__(server.access)
        self.server, self.worker, self.metrics, self.thread = server, worker, metrics, thread

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


JSON = "application/json"


@contextmanager
def api_server(
    engine: BatchEngine,
    model: Any,
    keys: Keys | None = None,
    metrics: Metrics | None = None,
    defaults: dict[str, Any] | None = None,
    view: LiveView | None = None,
    observers: Sequence[Observer] = (),
    admin_keys: Keys | None = None,
    **settings: Any,
) -> Iterator[Rig]:
    """A server on a free port for as long as the block lasts, with a live page where it has a view.

    engine, model  a generator, or what does as it does
    """
    chosen = ServerSettings(**{"port": 0, "shutdown_seconds": 0} | settings)
    counted = metrics or Metrics(NAME)
    service = Service(model, NAME, chosen.default_max_tokens, defaults or {})
    with contextlib.ExitStack() as stack:
        hearing = [counted, *observers, *([] if view is None else [view])]
        thread = EngineThread(engine, hearing, chosen.max_waiting)
        stack.enter_context(closing(thread))
        served = ServedModel(service, thread, counted, chosen, view)
        page = None if view is None else listen(chosen.host, 0)
        server = ApiServer(served, keys, listen(chosen.host, chosen.port), page, admin_keys)
        rig = Rig(server, thread, counted, threading.Thread(target=server.run))
        rig.thread.start()
        stack.callback(rig.stop)
        yield rig


def events_of(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The chunks of a response as they come."""
    for line in iter(response.readline, b""):
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line.removeprefix(b"data: "))
