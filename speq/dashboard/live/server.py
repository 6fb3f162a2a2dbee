"""Serves the live page on this machine until it is told to end."""

import socket

import uvicorn

from speq.dashboard.live.application import application
from speq.dashboard.live.broadcast import Broadcast
from speq.dashboard.live.connection import Connection
from speq.dashboard.live.guard import App, Guard, checked_host
from speq.dashboard.live.metrics import Metrics
from speq.dashboard.live.session import Shown
from speq.listening import listening_on

# Connections that are still open at the end are cut after this.
PATIENCE_S = 5


class LiveServer:
    """A session's page under `url`.

    listening  a socket that `bound` made, which the server closes; a browser that comes before
               `run` waits for it
    """

    def __init__(self, session: Shown, metrics: Metrics, listening: socket.socket) -> None:
        self._socket = listening
        host, port = listening.getsockname()[:2]
        self.guard = Guard(host, port)
        app = application(session, metrics, self.guard)
        self._server = Closing(config_of(app, PATIENCE_S), session.broadcast)

    @property
    def url(self) -> str:
        """The page's address, token and all."""
        return self.guard.url

    def run(self) -> None:
        """Serve until `stop`, or an interrupt where this is the main thread: raises
        KeyboardInterrupt then.
        """
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `run`; from any thread."""
        self._server.should_exit = True


class Closing(uvicorn.Server):
    """Sends listeners home as it ends: it waits for their connections, which never end else."""

    def __init__(self, config: uvicorn.Config, broadcast: Broadcast) -> None:
        super().__init__(config)
        self._broadcast = broadcast

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._broadcast.close()
        await super().shutdown(sockets)


def config_of(app: App, patience_s: int) -> uvicorn.Config:
    """How an application is served. patience_s: open connections are cut after this at the end."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        # It would show the token.
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=patience_s,
    )


def bound(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """As `port_of`. Raises SpeqError for a host that other machines reach."""
    return port_of(checked_host(host), port)


def port_of(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: any that is free.

    Raises SpeqError where the port is not to be had.
    """
    remedy = "give another --port, or 0 for any that is free"
    return listening_on(host, port, f"port {port} of {host}", remedy)
