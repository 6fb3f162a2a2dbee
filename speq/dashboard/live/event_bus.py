"""Events of a request, for subscribers that come and go and may be slow."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from speq.errors import present


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """kind: `begun`, `prompt`, `token`, `panels`, `finished` or `failed`; data: JSON, in a line.

    It is text already: one that goes to several subscribers is written once.
    """

    kind: str
    data: str

    @classmethod
    def of(cls, kind: str, data: dict[str, Any]) -> "LiveEvent":
        return cls(kind, json.dumps(data))


@dataclass(slots=True)
class RequestEvents:
    """All events of one request.

    latest  of kinds of which the last event says all: (how many there were, the last one)
    """

    number: int
    begun: LiveEvent
    tokens: list[LiveEvent] = field(default_factory=list)
    latest: dict[str, tuple[int, LiveEvent]] = field(default_factory=dict)
    end: LiveEvent | None = None


@dataclass(slots=True)
class Subscriber:
    """How far one subscriber has read. It holds no events, so that a slow one costs nothing: it
    takes all tokens when it comes to it, and of pictures the last one.

    wake    called from any thread where there is something to take; must return at once
    closed  there will be nothing more
    """

    wake: Callable[[], None]
    number: int = 0
    tokens: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    closed: bool = False

    def unread(self, events: RequestEvents) -> Iterator[LiveEvent]:
        """What it has not read yet, in the order in which it is to be understood."""
        if self.number != events.number:
            self.number, self.tokens, self.seen, self.ended = events.number, 0, {}, False
            yield events.begun
        yield from events.tokens[self.tokens :]
        self.tokens = len(events.tokens)
        for kind, (count, event) in events.latest.items():
            if self.seen.get(kind) != count:
                self.seen[kind] = count
                yield event
        if events.end is not None and not self.ended:
            self.ended = True
            yield events.end


class EventBus:
    """Events of the request that is shown, or was last. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: RequestEvents | None = None
        self._requests = 0
        self._closed = False
        self._subscribers: list[Subscriber] = []

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscribers)

    def begin(self, data: dict[str, Any]) -> int:
        """Forget the request before; return the number of the new one, from 1."""
        with self._lock:
            self._requests += 1
            begun = LiveEvent.of("begun", data | {"run": self._requests})
            self._events = RequestEvents(self._requests, begun)
            self._wake()
            return self._requests

    def add_token(self, data: dict[str, Any]) -> None:
        event = LiveEvent.of("token", data)
        with self._lock:
            self._current.tokens.append(event)
            self._wake()

    def replace(self, kind: str, data: dict[str, Any]) -> None:
        """Tell what replaces the last event of its kind."""
        event = LiveEvent.of(kind, data)
        with self._lock:
            count, _ = self._current.latest.get(kind, (0, event))
            self._current.latest[kind] = count + 1, event
            self._wake()

    def end(self, kind: str, data: dict[str, Any]) -> None:
        event = LiveEvent.of(kind, data)
        with self._lock:
            self._current.end = event
            self._wake()

    def take(self, subscriber: Subscriber) -> list[LiveEvent]:
        """What a subscriber has not read yet."""
        with self._lock:
            return [] if self._events is None else list(subscriber.unread(self._events))

    @contextmanager
    def subscribe(self, wake: Callable[[], None]) -> Iterator[Subscriber]:
        """A subscriber, as long as the block lasts. `wake` is never called after it."""
        subscriber = Subscriber(wake)
        with self._lock:
            subscriber.closed = self._closed
            self._subscribers.append(subscriber)
        try:
            yield subscriber
        finally:
            with self._lock:
                self._subscribers.remove(subscriber)

    def close(self) -> None:
        """Send all subscribers home, those of later too."""
        with self._lock:
            self._closed = True
            for subscriber in self._subscribers:
                subscriber.closed = True
            self._wake()

    @property
    def _current(self) -> RequestEvents:
        return present(self._events, "an event came before its request began")

    def _wake(self) -> None:
        # Under the lock: a subscriber that has left may have taken with it what `wake` needs.
        for subscriber in self._subscribers:
            subscriber.wake()
