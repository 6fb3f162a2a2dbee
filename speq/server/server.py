"""Serves the application until it is told to end, and lets requests finish."""

import asyncio
import contextlib
import math
import socket

import uvicorn

from speq.dashboard.live.guard import App, authorities_of, authority
from speq.dashboard.live.metrics import Metrics
from speq.dashboard.live.server import PATIENCE_S, config_of
from speq.engine.engine_thread import EngineThread
from speq.server.application import application
from speq.server.gate import Access, Gate
from speq.server.keys import Keys
from speq.server.service import Service
from speq.server.settings import ServeSettings

# Requests that are looked at or refused beside those that run and wait.
BESIDE = 64


class ApiServer:
    """A service under `url`.

    keys       None: whoever reaches it may ask
    listening  a socket that listens, which the server closes; who comes before `run` waits for it
    """

    def __init__(
        self,
        service: Service,
        worker: EngineThread,
        metrics: Metrics,
        settings: ServeSettings,
        keys: Keys | None,
        listening: socket.socket,
    ) -> None:
        self._socket = listening
        self.host, self.port = listening.getsockname()[:2]
        access = Access(
            authorities_of(self.host, self.port),
            keys,
            settings.max_body,
            worker.capacity + BESIDE,
        )
        app = Gate(application(service, worker, metrics), access)
        self._server = Draining(app, worker, settings.shutdown_seconds)

    @property
    def url(self) -> str:
        """What clients take as base URL."""
        return f"http://{authority(self.host, self.port)}/v1"

    def run(self) -> None:
        """Serve until `stop`, or an interrupt where this is the main thread: raises
        KeyboardInterrupt then.
        """
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `run` as an interrupt would; from any thread."""
        self._server.should_exit = True


class Draining(uvicorn.Server):
    """Lets requests under way finish within `shutdown_s` as it ends, and cancels them then. Those
    that wait are sent home at once.
    """

    def __init__(self, app: App, worker: EngineThread, shutdown_s: float) -> None:
        # Answers end by themselves once the worker has cancelled them.
        super().__init__(config_of(app, math.ceil(shutdown_s) + PATIENCE_S))
        self._worker, self._shutdown_s = worker, shutdown_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.drain()
        ending = asyncio.ensure_future(self._abort())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def _abort(self) -> None:
        await asyncio.sleep(self._shutdown_s)
        self._worker.abort()
