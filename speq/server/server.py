"""Serves the application until it is told to end, and lets requests finish."""

import asyncio
import contextlib
import math
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from speq.dashboard.live.live_view import LiveView, watch
from speq.engine.engine_thread import EngineThread, Observer
from speq.engine.generation_config import sampling_defaults
from speq.generator import Generator
from speq.listening import listening_on
from speq.server.access import Access, Keys, digest
from speq.server.application import make_app
from speq.server.chat_page import add_chat_page
from speq.server.connection import Connection
from speq.server.gate import AccessGate
from speq.server.live_page import add_live_page
from speq.server.metrics import Metrics
from speq.server.request_log import RequestLog
from speq.server.service import Service
from speq.server.settings import ServerSettings

# Requests that are looked at or refused beside those that run and wait.
EXTRA_REQUESTS = 64
# Connections that are still open at the end are cut after this.
PATIENCE_S = 5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served. view: what its live page shows"""

    service: Service
    thread: EngineThread
    metrics: Metrics
    settings: ServerSettings
    view: LiveView | None = None

    def gated_app(self, access: Access, token: str | None = None) -> AccessGate:
        """The application behind its gate. token: of the live page, which is there as well"""
        app = make_app(self.service, self.thread, self.metrics)
        if self.view is not None and token is not None:
            add_live_page(app, self.view, token)
        else:
            add_chat_page(app)
        return AccessGate(app, access, self.thread.capacity + EXTRA_REQUESTS)


@contextmanager
def serve_model(
    generator: Generator, name: str, settings: ServerSettings, watched: bool = False
) -> Iterator[ServedModel]:
    """Have an engine thread run a generator within the block. name: clients call the model so"""
    metrics = Metrics(name)
    with ExitStack() as stack:
        stack.enter_context(metrics.listening(generator.runtime.recorder))
        view = stack.enter_context(watch(generator)) if watched else None
        observers: list[Observer] = [metrics, RequestLog()]
        if view is not None:
            observers.append(view)
        thread = EngineThread(generator, observers, settings.max_waiting)
        stack.enter_context(closing(thread))
        folder = generator.runtime.opened.checkpoint.path
        service = Service(generator, name, settings.default_max_tokens, sampling_defaults(folder))
        yield ServedModel(service, thread, metrics, settings, view)


class ApiServer:
    """A served model at one or two addresses: for clients, and for its live page.

    keys            None: whoever reaches the clients' address may ask
    admin_keys      of who may change the server; None: nobody
    listening       a socket that listens, which the server closes; who comes before `run` waits
    page_listening  another one, on an address of this machine's own, where the model is watched
    """

    def __init__(
        self,
        model: ServedModel,
        keys: Keys | None,
        listening: socket.socket | None,
        page_listening: socket.socket | None = None,
        admin_keys: Keys | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        most = model.settings.max_body
        self._sockets, gates = [], {}
        if listening is not None:
            host, port = listening.getsockname()[:2]
            named = model.settings
            self.access = Access(
                *(host, port, keys, most),
                hosts=named.allow_host,
                origins=named.cors,
                admin_keys=admin_keys,
            )
            gates[self.access.port] = model.gated_app(self.access)
            self._sockets.append(listening)
        if page_listening is not None:
            host, port = page_listening.getsockname()[:2]
            self.page = Access(host, port, Keys((digest(self.token),)), most, page=True)
            gates[self.page.port] = model.gated_app(self.page, self.token)
            self._sockets.append(page_listening)
        self._server = DrainingServer(by_port(gates), model)

    @property
    def url(self) -> str:
        """What clients take as base URL."""
        return f"http://{self.access.authority}/v1"

    @property
    def page_url(self) -> str:
        """The live page's address, token and all."""
        return f"http://{self.page.authority}/?{urlencode({'token': self.token})}"

    def run(self) -> None:
        """Serve until `stop`, or an interrupt where this is the main thread: raises
        KeyboardInterrupt then.
        """
        try:
            self._server.run(sockets=self._sockets)
        finally:
            for each in self._sockets:
                each.close()

    def stop(self) -> None:
        """End `run` as an interrupt would; from any thread."""
        self._server.should_exit = True


def by_port(gates: dict[int, AccessGate]) -> ASGIApp:
    """An application for each port that is listened on."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gates[scope["server"][1]](scope, receive, send)

    return app


class DrainingServer(uvicorn.Server):
    """Lets requests that run finish within `shutdown_seconds` as it ends, and cancels them then.
    Those that wait are refused at once.
    """

    def __init__(self, app: ASGIApp, model: ServedModel) -> None:
        self._model, self._shutdown_s = model, model.settings.shutdown_seconds
        # Answers end by themselves once the engine's thread has cancelled them.
        super().__init__(uvicorn_config(app, math.ceil(self._shutdown_s) + PATIENCE_S))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._model.thread.drain()
        if self._model.view is not None:
            self._model.view.close()  # streams of events never end else
        ending = asyncio.ensure_future(self._abort())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def _abort(self) -> None:
        await asyncio.sleep(self._shutdown_s)
        self._model.thread.abort()


def uvicorn_config(app: ASGIApp, patience_s: int) -> uvicorn.Config:
    """How an application is served. patience_s: open connections are cut after this at the end"""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        # It would show the page's token.
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=patience_s,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: any that is free.

    Raises SpeqError where the port is not to be had.
    """
    remedy = "give another --port, or 0 for any that is free"
    return listening_on(host, port, f"port {port} of {host}", remedy)
