"""What a client hears while its request waits, and while its prompt is run."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pytest

from speq.server import answer
from tests.helpers.api_server import NAME, QUESTION, Rig, api_server
from tests.helpers.command import PATIENCE_S
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces


@dataclass
class Held:
    """Holds a prompt behind its first part, or behind its second one, until it is let go."""

    reached: list[threading.Event] = field(
        default_factory=lambda: [threading.Event() for _ in range(2)]
    )
    allowed: list[threading.Event] = field(
        default_factory=lambda: [threading.Event() for _ in range(2)]
    )

    def before_prompt(self, done: int) -> None:
        self.reached[done - 1].set()
        assert self.allowed[done - 1].wait(PATIENCE_S)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def rig(held: Held, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(answer, "PROGRESS_S", 0.01)
    monkeypatch.setattr(answer, "HEARTBEAT_S", 0.01)
    engine = ScriptedEngine(pieces("Hel", "lo."), before_prompt=held.before_prompt)
    with api_server(engine, ScriptedModel(), max_waiting=3) as made:
        yield made
        for each in held.allowed:
            each.set()


def stream(rig: Rig, **fields: Any) -> BinaryIO:
    """The lines of a stream, behind its head."""
    made = socket.create_connection((rig.server.access.host, rig.port), PATIENCE_S)
    body = json.dumps({"model": NAME, "messages": QUESTION, "stream": True} | fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {rig.server.access.host}:{rig.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    made.sendall(head.encode() + body)
    return made.makefile("rb")


def comments(lines: BinaryIO) -> Iterator[str]:
    for line in lines:
        if line.startswith(b": "):
            yield line.decode().strip(": \r\n")


def progress(lines: BinaryIO) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: {"):
            told = json.loads(line.removeprefix(b"data: "))
            if "prompt_progress" in told:
                assert told["object"] == "chat.completion.chunk"
                yield told["prompt_progress"]


def test_comments_say_what_is_waited_for(rig: Rig, held: Held) -> None:
    first = stream(rig)
    assert held.reached[0].wait(PATIENCE_S)
    second = comments(stream(rig))
    count = len(ScriptedModel().encode(QUESTION))
    assert next(second) == "1 requests ahead"
    said = comments(first)
    assert next(said) == f"0 of {count} tokens of the prompt"
    held.allowed[0].set()
    assert f"1 of {count} tokens of the prompt" in said
    held.allowed[1].set()
    rest = [*second]
    assert set(rest) <= {"1 requests ahead", f"{count} of {count} tokens of the prompt", "here"} | {
        f"{done} of {count} tokens of the prompt" for done in range(count)
    }


def test_progress_is_told_where_it_is_asked_for(rig: Rig, held: Held) -> None:
    first = progress(stream(rig, return_progress=True))
    assert held.reached[0].wait(PATIENCE_S)
    told = next(first)
    count = len(ScriptedModel().encode(QUESTION))
    assert told.pop("time_ms") > 0
    assert told == {"total": count, "cache": 0, "processed": 0, "requests_ahead": 0}
    second = progress(stream(rig, return_progress=True))
    told = next(second)
    assert (told["requests_ahead"], told["processed"], told["time_ms"]) == (1, 0, 0.0)
    held.allowed[0].set()
    assert any(each["processed"] == 1 for each in first)
    held.allowed[1].set()
    assert all(each["total"] == count for each in second)


def test_progress_is_for_streams(rig: Rig) -> None:
    refused = rig.chat(return_progress=True)
    assert refused.status == 400
    assert "stream is not true; give both" in refused.error["message"]
