"""Clients that leave, and a server that ends: nothing goes on that nobody waits for."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from speq import Generator
from tests.helpers.api_server import JSON, NAME, QUESTION, Rig, api_server, events_of
from tests.helpers.command import PATIENCE_S
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces

TEXTS = tuple("abcdefgh")


class Steps:
    """A scripted engine whose tokens come one by one, as they are asked for."""

    def __init__(self) -> None:
        self.reached: list[int] = []
        self._at, self._allowed = threading.Condition(), 0
        self.engine = ScriptedEngine(pieces(*TEXTS), before=self._wait)

    def _wait(self, at: int) -> None:
        with self._at:
            self.reached.append(at)
            self._at.notify_all()
            assert self._at.wait_for(lambda: self._allowed > at, PATIENCE_S)

    def allow(self, tokens: int) -> None:
        """Let so many tokens come."""
        with self._at:
            self._allowed = tokens
            self._at.notify_all()

    def wait_until_at(self, token: int) -> None:
        with self._at:
            assert self._at.wait_for(lambda: token in self.reached, PATIENCE_S)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def rig(steps: Steps) -> Iterator[Rig]:
    with api_server(steps.engine, ScriptedModel(), max_waiting=3) as made:
        yield made
        steps.allow(len(TEXTS))


def asked(rig: Rig, stream: bool) -> socket.socket:
    """A connection that has asked for a chat."""
    made = socket.create_connection((rig.server.access.host, rig.port), PATIENCE_S)
    body = json.dumps({"model": NAME, "messages": QUESTION, "stream": stream}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {rig.server.access.host}:{rig.port}\r\n"
        f"Content-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    made.sendall(head.encode() + body)
    return made


def wait_until_idle(rig: Rig) -> None:
    """Each look is a request of its own, which takes its time."""
    for _ in range(10_000):
        stats = rig.worker.queue_lengths
        rig.get("/health")
        if stats.running == stats.waiting == 0:
            return
    raise AssertionError("a request that nobody waits for goes on")


def wait_until_cancelled(rig: Rig) -> None:
    for _ in range(10_000):
        if any(stream.cancelled for stream in rig.worker._taken):
            return
        rig.get("/health")
    raise AssertionError("the server does not notice that its client has left")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_within_a_step(rig: Rig, steps: Steps, stream: bool) -> None:
    with closing(asked(rig, stream)):
        steps.allow(2)
        steps.wait_until_at(2)
    wait_until_cancelled(rig)
    # Token 2 was under way. It is the last one.
    steps.allow(len(TEXTS))
    wait_until_idle(rig)
    assert steps.reached == [0, 1, 2]
    assert steps.engine.closed == 1
    steps.reached.clear()
    assert rig.chat().status == 200
    assert b'finished_reason="abort"' in rig.get("/metrics").body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(rig: Rig, steps: Steps, stream: bool) -> None:
    with closing(asked(rig, stream)):
        steps.wait_until_at(0)
        with closing(asked(rig, stream)):
            while rig.worker.queue_lengths.waiting == 0:
                rig.get("/health")
        while rig.worker.queue_lengths.waiting:
            rig.get("/health")
        steps.allow(len(TEXTS))
        wait_until_idle(rig)
    assert len(steps.engine.asked) == 1


def test_tokens_come_as_they_are_made(rig: Rig, steps: Steps) -> None:
    steps.allow(1)
    with rig.streaming() as response:
        events = events_of(response)
        for at, text in enumerate(TEXTS):
            told = next(events)
            if at == 0:
                assert told["choices"][0]["delta"]["role"] == "assistant"
                told = next(events)
            assert told["choices"][0]["delta"] == {"content": text}
            assert max(steps.reached) <= at + 1
            steps.allow(at + 2)
        assert next(events)["choices"][0]["finish_reason"] == "stop"


def test_a_server_that_ends_lets_a_request_finish(steps: Steps) -> None:
    replies = []
    with api_server(steps.engine, ScriptedModel(), shutdown_seconds=PATIENCE_S) as rig:
        threads = [threading.Thread(target=lambda: replies.append(rig.chat())) for _ in range(2)]
        threads[0].start()
        steps.wait_until_at(0)
        threads[1].start()
        while rig.worker.queue_lengths.waiting == 0:
            rig.get("/health")
        rig.server.stop()
        threads[1].join(PATIENCE_S)
        # The one that waited was sent home; nobody new is let in.
        assert [reply.status for reply in replies] == [503]
        assert replies[0].error["message"].startswith("the server is ending")
        with pytest.raises(ConnectionError):
            rig.get("/health")
        steps.allow(len(TEXTS))
        threads[0].join(PATIENCE_S)
        rig.thread.join(PATIENCE_S)
    assert replies[1].status == 200
    assert replies[1].json["choices"][0]["message"]["content"] == "".join(TEXTS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_cancels_what_takes_too_long(steps: Steps, stream: bool) -> None:
    replies = []
    with api_server(steps.engine, ScriptedModel(), shutdown_seconds=0) as rig:
        thread = threading.Thread(target=lambda: replies.append(rig.chat(stream=stream)))
        thread.start()
        steps.allow(1)
        steps.wait_until_at(1)
        rig.server.stop()
        while not rig.worker._aborting:
            assert rig.thread.is_alive()
        steps.allow(len(TEXTS))
        thread.join(PATIENCE_S)
        rig.thread.join(PATIENCE_S)
        assert not rig.thread.is_alive()
    assert steps.reached == [0, 1]
    (reply,) = replies
    if stream:
        told = reply.chunks
        assert told[1]["choices"][0]["delta"] == {"content": "a"}
        assert told[2]["error"]["message"].startswith("the server is ending")
    else:
        assert (reply.status, reply.error["code"]) == (503, "unavailable")


def test_a_real_run_is_cancelled_and_the_next_is_sound(served: Rig, generator: Generator) -> None:
    wanted = generator.generate(QUESTION, max_new_tokens=12)
    seen: list[int] = []
    steps = generator.runtime.recorder.listeners
    left = threading.Event()

    def at_step(step: object) -> None:
        seen.append(len(seen))
        # The client leaves while this step goes on.
        if len(seen) == 2:
            left.wait(PATIENCE_S)

    steps.append(at_step)
    try:
        with served.streaming(max_tokens=400, temperature=0, ignore_eos=True) as response:
            assert response.status == 200
            next(events_of(response))
        wait_until_cancelled(served)
        left.set()
        wait_until_idle(served)
        assert len(seen) == 2
    finally:
        steps.remove(at_step)
    answer = served.chat(max_tokens=12, temperature=0).json
    assert answer["choices"][0]["message"]["content"] == wanted.text
