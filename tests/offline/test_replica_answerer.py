"""Requests of a file to replicas: by a stand-in for Ray, and a replica by itself."""

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from speq.config import RunConfig, SamplingParams
from speq.errors import SpeqError
from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestLine
from speq.ray.batch import MOST_LOSSES, BatchReplica, ReplicaAnswerer
from speq.ray.replicas import ReplicaSpec
from speq.server.settings import ServerSettings


class RayError(Exception):
    """A replica is lost."""


class RayTaskError(RayError):
    """A replica raised something."""


@dataclass
class Handle:
    """Answers requests, those of even numbers first.

    lost   how many replicas each request takes along; most: requests at a time
    """

    lost: Counter[int] = field(default_factory=Counter)
    answers: dict[int, str] = field(default_factory=dict)
    most: int = 0
    running: int = 0

    @property
    def answer(self) -> "Handle":
        return self

    async def remote(self, line: RequestLine) -> AnswerLine | str:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(1 + line.number % 2):
            await asyncio.sleep(0)
        self.running -= 1
        if self.lost[line.number]:
            self.lost[line.number] -= 1
            raise RayError("its machine is gone.\nand more")
        return self.answers.get(line.number, AnswerLine(line.number, {}))


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("ray.exceptions")
    made.RayError, made.RayTaskError = RayError, RayTaskError
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.exceptions", made)


def numbers(handle: Handle, count: int, most: int = 4) -> list[int]:
    lines = [RequestLine(number, number + 1, b"{}") for number in range(count)]
    answers = ReplicaAnswerer(handle, most).answers(lines)
    return [answer.number for group in answers for answer in group]


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 3), (20, 1), (20, 7)])
def test_each_request_is_answered_once(count: int, most: int) -> None:
    handle = Handle()
    assert sorted(numbers(handle, count, most)) == [*range(count)]
    assert handle.most == min(most, count)


def test_what_a_lost_replica_had_goes_to_another() -> None:
    handle = Handle(Counter({2: 1, 3: MOST_LOSSES - 1}))
    assert sorted(numbers(handle, 9)) == [*range(9)]
    assert not +handle.lost


def test_a_request_that_takes_its_replicas_along_ends_the_job() -> None:
    handle = Handle(Counter({3: 9}))
    with pytest.raises(SpeqError, match=r"3 replicas were lost .* in line 4 \(its machine is"):
        numbers(handle, 9)
    assert handle.lost[3] == 9 - MOST_LOSSES


def test_a_machine_that_fails_ends_the_job() -> None:
    with pytest.raises(SpeqError, match="the disk failed"):
        numbers(Handle(answers={5: "the disk failed"}), 9)


def test_a_replica_answers_lines(bundled: Path) -> None:
    run = RunConfig.of("64MiB", context_length=64, reader_threads=2)
    spec = ReplicaSpec(str(bundled), "tiny", run, ServerSettings())
    replica = BatchReplica(spec, SamplingParams(max_new_tokens=3, ignore_eos=True))
    try:

        def answer(content: bytes) -> Any:
            return asyncio.run(replica.answer(RequestLine(6, 7, content)))

        made = answer(b'{"custom_id": "a", "prompt": [5, 6]}')
        assert (made.number, made.prompt_tokens, made.new_tokens) == (6, 2, 3)
        assert (made.content["line"], made.content["custom_id"]) == (7, "a")
        assert made.content["stats"]["new_tokens"] == 3
        for content, sentence in (
            (b"[]", "line 7 holds a JSON list"),
            (b'{"prompt": [5], "max_new_tokens": 99}', "64"),
        ):
            assert sentence in (answer(content).error or "")
        replica._served.thread.failure = "the engine died"
        assert answer(b'{"prompt": [5]}') == "the engine died"
    finally:
        replica.__del__()
