"""Clients of a server: some read slowly, some leave, some send half of what they announced.

They speak ASGI to the application behind its gate, in a loop whose clock leaps. The engine runs in
a thread of its own, so how far it is when something happens is not the schedule's; what must hold
does not depend on it.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

from starlette.types import ASGIApp, Message
from transformers import AutoTokenizer

from speq import Generator
from speq.server.access import Access
from speq.server.server import ServedModel, serve_model
from speq.server.settings import ServerSettings
from tests.helpers.leaping_loop import leaping
from tests.simulation.play import Event, check_quiet
from tests.simulation.readers import SimulatedReaders
from tests.simulation.world import World

NAME, HOST, PORT = "simulated", "127.0.0.1", 8000
MOST_WAITING = 4
# Half-sent bodies at a time.
BURST = 25
# Chunks that a connection holds for who does not read.
UNREAD = 2


@dataclass(eq=False)
class Client:
    """A request, and what has come of it.

    content  of the body; None: there is none
    half     no more than a part of the body is ever sent
    slow     it reads when the schedule says so
    wanted   the exact text
    crowded  so many others asked before it that it may be refused
    refused  its body is wrong
    """

    path: str
    content: Any = None
    half: bool = False
    slow: bool = False
    wanted: str | None = None
    crowded: bool = False
    refused: bool = False
    status: int = 0
    body: bytes = b""
    ended: bool = False
    _unread: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _read: asyncio.Event = field(default_factory=asyncio.Event)
    _told: bool = False

    async def ask(self, app: ASGIApp) -> None:
        body = b"" if self.content is None else json.dumps(self.content).encode()
        headers = [(b"host", f"{HOST}:{PORT}".encode())]
        if body:
            headers += [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST" if body else "GET",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": (HOST, 50000),
            "server": (HOST, PORT),
        }

        async def receive() -> Message:
            if not self._told:
                self._told = True
                part = body[:-1] if self.half else body
                return {"type": "http.request", "body": part, "more_body": self.half}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        await app(scope, receive, self._send)
        self.ended = not self._gone.is_set()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        while self.slow and self._unread >= UNREAD and not self._gone.is_set():
            self._read.clear()
            await self._read.wait()
        self._unread += 1
        self.body += message.get("body", b"")

    def read(self) -> None:
        self._unread = 0
        self._read.set()

    def leave(self) -> None:
        self._gone.set()
        self._read.set()

    @property
    def text(self) -> str:
        """What came of the text that was asked for, whole or in chunks."""
        if not self.content.get("stream"):
            return str(json.loads(self.body)["choices"][0]["text"]) if self.body else ""
        frames = self.body.decode().split("\n\n")
        told = [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: {")]
        return "".join(json.loads(frame)["choices"][0]["text"] for frame in told)


@dataclass
class ServedSimulation:
    """A server, from its start to its end."""

    world: World
    counts: dict[str, int] = field(default_factory=dict)
    _tasks: dict[Client, "asyncio.Task[None]"] = field(default_factory=dict)

    def play(self, events: Sequence[Event]) -> None:
        """Raises whatever is found."""
        world = self.world
        SimulatedReaders.chance.interrupt_in = None  # of a world that was played before
        with mock.patch("speq.engine_layout.ReaderThreads", SimulatedReaders):
            generator = Generator.from_pretrained(world.folder, world.budget, **world.options)
            settings = ServerSettings(max_waiting=MOST_WAITING)
            with closing(generator), serve_model(generator, NAME, settings) as model:

                def busy() -> bool:
                    lengths = model.thread.queue_lengths
                    return lengths.running + lengths.waiting > 0

                leaping(self.happen(model, events), busy)
                assert model.thread.failure is None, f"the engine failed: {model.thread.failure}"
                check_quiet(generator)

    async def happen(self, model: ServedModel, events: Sequence[Event]) -> None:
        app = model.gated_app(Access(HOST, PORT, None, model.settings.max_body))
        for event in events:
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
            rng = random.Random(event.number)
            SimulatedReaders.chance.rng = random.Random(event.number + 1)
            await getattr(self, event.kind)(app, rng)
            await asyncio.sleep(0)
            self.look()
        for client in self._tasks:
            client.leave()
        await asyncio.gather(*self._tasks.values())
        while (lengths := model.thread.queue_lengths).running or lengths.waiting:
            await asyncio.sleep(1)
        health = await self.answered(app, Client("/health"))
        assert json.loads(health.body) == {"status": "ok", "running": 0, "waiting": 0}

    def begin(self, app: ASGIApp, client: Client) -> "asyncio.Task[None]":
        self._tasks[client] = asyncio.get_running_loop().create_task(client.ask(app))
        return self._tasks[client]

    async def answered(self, app: ASGIApp, client: Client) -> Client:
        """Ask, and read the whole answer."""
        await self.begin(app, client)
        return client

    # --- events ---

    async def ask(self, app: ASGIApp, rng: random.Random) -> None:
        at, tokens = rng.randrange(len(self.world.prompts)), rng.randint(1, self.world.tokens)
        asked = {
            "model": NAME,
            "prompt": list(self.world.prompts[at]),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
        }
        text = self.decode(self.world.wanted[at, None][:tokens])
        crowded = sum(not each.half for each in self._tasks) >= MOST_WAITING
        slow = rng.random() < 0.3
        self.begin(app, Client("/v1/completions", asked, slow=slow, wanted=text, crowded=crowded))

    async def half(self, app: ASGIApp, rng: random.Random) -> None:
        for _ in range(BURST):
            asked = {"prompt": "x" * rng.choice([1, 1000, 100_000])}
            self.begin(app, Client("/v1/completions", asked, half=True))

    async def wrong(self, app: ASGIApp, rng: random.Random) -> None:
        asked = rng.choice([{"prompt": -1}, [], {"prompt": "a", "nothing": 1}, {"model": NAME}])
        self.begin(app, Client("/v1/completions", asked, refused=True))

    async def health(self, app: ASGIApp, rng: random.Random) -> None:
        client = await self.answered(app, Client("/health"))
        assert client.status == 200, f"/health: {client.status}"

    async def read(self, app: ASGIApp, rng: random.Random) -> None:
        for client in self._tasks:
            client.read()

    async def leave(self, app: ASGIApp, rng: random.Random) -> None:
        if self._tasks:
            rng.choice([*self._tasks]).leave()

    async def wait(self, app: ASGIApp, rng: random.Random) -> None:
        await asyncio.sleep(rng.choice([0.01, 1, 9, 60]))

    # --- what holds ---

    def look(self) -> None:
        """Check what has come so far."""
        for client, task in [*self._tasks.items()]:
            if task.done():
                task.result()
                del self._tasks[client]
            self.check(client)

    def check(self, client: Client) -> None:
        if client.ended:
            name = f"answered {client.status}"
            self.counts[name] = self.counts.get(name, 0) + 1
        if client.half:
            assert client.status in (0, 408), f"half a body is answered with {client.status}"
        elif client.refused:
            assert client.status in (0, 400, 422), f"a wrong body is answered with {client.status}"
        elif client.status == 429:
            assert client.crowded, "a request is refused while few are there"
        elif client.wanted is not None:
            assert client.status in (0, 200), f"a request is answered with {client.status}"
            told = client.text
            right = told == client.wanted if client.ended else client.wanted.startswith(told)
            assert right, f"{told!r}, not {client.wanted!r}"

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.world.folder)
