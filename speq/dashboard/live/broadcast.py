"""What is told of a generation, to listeners that come and go and may be slow."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from speq.errors import present


@dataclass(frozen=True, slots=True)
class Event:
    """kind: `begun`, `prompt`, `token`, `panels`, `finished` or `failed`; data: JSON, in a line.

    It is text already: one that goes to several listeners is written once.
    """

    kind: str
    data: str

    @classmethod
    def of(cls, kind: str, data: dict[str, Any]) -> "Event":
        return cls(kind, json.dumps(data))


@dataclass(slots=True)
class Told:
    """What there is to be told of one generation.

    newest  of kinds of which the last one says all: (how many there were, the last one)
    """

    number: int
    begun: Event
    tokens: list[Event] = field(default_factory=list)
    newest: dict[str, tuple[int, Event]] = field(default_factory=dict)
    end: Event | None = None


@dataclass(slots=True)
class Listener:
    """How far one listener has heard. It holds no events, so that a slow one costs nothing: it
    takes all tokens when it comes to it, and of pictures the last one.

    wake    called from any thread where there is something to take; must return at once
    closed  there will be nothing more
    """

    wake: Callable[[], None]
    run: int = 0
    tokens: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    closed: bool = False

    def news(self, told: Told) -> Iterator[Event]:
        """What it has not heard yet, in the order in which it is to be understood."""
        if self.run != told.number:
            self.run, self.tokens, self.seen, self.ended = told.number, 0, {}, False
            yield told.begun
        yield from told.tokens[self.tokens :]
        self.tokens = len(told.tokens)
        for kind, (count, event) in told.newest.items():
            if self.seen.get(kind) != count:
                self.seen[kind] = count
                yield event
        if told.end is not None and not self.ended:
            self.ended = True
            yield told.end


class Broadcast:
    """The last generation's events, for any number of listeners. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: Told | None = None
        self._runs = 0
        self._closed = False
        self._listeners: list[Listener] = []

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def begin(self, data: dict[str, Any]) -> int:
        """Forget the generation before; return the number of the new one, from 1."""
        with self._lock:
            self._runs += 1
            self._told = Told(self._runs, Event.of("begun", data | {"run": self._runs}))
            self._wake()
            return self._runs

    def token(self, data: dict[str, Any]) -> None:
        event = Event.of("token", data)
        with self._lock:
            self._now.tokens.append(event)
            self._wake()

    def newest(self, kind: str, data: dict[str, Any]) -> None:
        """Tell what replaces the last one of its kind."""
        event = Event.of(kind, data)
        with self._lock:
            count, _ = self._now.newest.get(kind, (0, event))
            self._now.newest[kind] = count + 1, event
            self._wake()

    def end(self, kind: str, data: dict[str, Any]) -> None:
        event = Event.of(kind, data)
        with self._lock:
            self._now.end = event
            self._wake()

    def take(self, listener: Listener) -> list[Event]:
        """What a listener has not heard yet."""
        with self._lock:
            return [] if self._told is None else list(listener.news(self._told))

    @contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[Listener]:
        """A listener, as long as the block lasts. `wake` is never called after it."""
        listener = Listener(wake)
        with self._lock:
            listener.closed = self._closed
            self._listeners.append(listener)
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def close(self) -> None:
        """Send all listeners home, those of later too."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.closed = True
            self._wake()

    @property
    def _now(self) -> Told:
        return present(self._told, "a text goes on that has not begun")

    def _wake(self) -> None:
        # Under the lock: a listener that has left may have taken with it what `wake` needs.
        for listener in self._listeners:
            listener.wake()
