"""Connections that nothing comes of, by a clock of the test's own."""

import asyncio
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from speq.server.connection import HEADERS_S, MOST_IDLE, TAKEN_S, Connection
from speq.server.server import uvicorn_config
from tests.helpers.leaping_loop import leaping

ASKED = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Wire(asyncio.Transport):
    """What a connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.cut_s, self.protocol = b"", None, cast(Connection, None)

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.cut_s is not None

    def abort(self) -> None:
        if self.cut_s is None:
            self.cut_s = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    close = abort

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Line:
    """Connections to an application that answers once it is let go, piece by piece."""

    def __init__(self, pieces: int = 1) -> None:
        self.go, self.pieces, self.ended = asyncio.Event(), pieces, 0
        self.config: uvicorn.Config = uvicorn_config(self, 5)
        self.state = ServerState()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(self.pieces):
            more = at < self.pieces - 1
            await send({"type": "http.response.body", "body": b"a", "more_body": more})
        self.ended += 1

    def connect(self) -> Wire:
        wire = Wire()
        wire.protocol = Connection(self.config, self.state, {}, asyncio.get_running_loop())
        wire.protocol.connection_made(wire)
        return wire


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_headers_have_a_time() -> None:
    async def run() -> None:
        line = Line()
        silent, half = line.connect(), line.connect()
        for at in range(4):  # however it is spread
            await asyncio.sleep(2)
            half.protocol.data_received(ASKED[at : at + 1])
        await asyncio.sleep(10)
        assert silent.cut_s == half.cut_s == HEADERS_S
        assert not silent.written and not line.state.connections

    leaping(run())


def test_answers_may_take_long() -> None:
    async def run() -> None:
        line = Line()
        wire = line.connect()
        wire.protocol.data_received(ASKED)
        await asyncio.sleep(1000)
        assert wire.cut_s is None
        line.go.set()
        await turns()
        assert b"200 OK" in wire.written
        # The next request has its time from its first byte on, and without one the line ends.
        wire.protocol.data_received(ASKED[:3])
        await asyncio.sleep(100)
        assert wire.cut_s == 1000 + HEADERS_S
        kept = line.connect()
        kept.protocol.data_received(ASKED)
        await asyncio.sleep(100)
        assert kept.cut_s == 1100 + 5  # uvicorn's own

    leaping(run())


def test_the_oldest_idle_connection_gives_way() -> None:
    async def run() -> None:
        line = Line()
        busy = [line.connect() for _ in range(3)]
        for wire in busy:
            wire.protocol.data_received(ASKED)
        idle = []
        for _ in range(MOST_IDLE + 2):
            idle.append(line.connect())
            await asyncio.sleep(0.01)
        assert [wire.cut_s is not None for wire in idle] == [True] * 2 + [False] * MOST_IDLE
        assert not any(wire.cut_s for wire in busy)
        assert len(line.state.connections) == MOST_IDLE + 3
        line.go.set()
        await turns()
        assert all(b"200 OK" in wire.written for wire in busy)

    leaping(run())


def test_who_reads_nothing_is_cut_off() -> None:
    """The application goes on, and hears that its client has left."""

    async def run() -> None:
        line = Line(pieces=3)
        wire, slow = line.connect(), line.connect()
        for each in (wire, slow):
            each.protocol.data_received(ASKED)
            each.protocol.pause_writing()
        line.go.set()
        await asyncio.sleep(TAKEN_S - 1)
        assert line.ended == 0
        slow.protocol.resume_writing()
        await turns()
        assert line.ended == 1 and b"aaa" in slow.written.replace(b"\r\n1\r\n", b"")
        await asyncio.sleep(5)
        assert (wire.cut_s, line.ended) == (TAKEN_S, 2)
        assert not wire.written

    leaping(run())
