"""Answers requests with workers elsewhere, block by block; what a lost one had goes to another."""

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from speq.errors import SpeqError
from speq.offline.answer import Answer
from speq.offline.request_file import RequestLine

# A request that was under way at so many losses is taken for their cause.
MOST_LOSSES = 3


@dataclass(frozen=True, slots=True)
class News:
    """Of a worker. ended: its block is done; lost: why the worker is gone, and another is there."""

    worker: int
    answers: list[Answer] = field(default_factory=list)
    ended: bool = False
    lost: str | None = None


class Workers(Protocol):
    """Several that answer blocks of requests, each one block at a time."""

    @property
    def idle(self) -> bool:
        """Whether one of them has no block."""

    def give(self, lines: list[RequestLine]) -> int:
        """Have an idle one answer these; its number, which no block had before."""

    def wait(self) -> News:
        """The next news. Raises SpeqError where no more answers can be had."""


@dataclass(slots=True)
class InBlocks:
    """block_requests: of a block at most."""

    workers: Workers
    block_requests: int
    _again: deque[RequestLine] = field(default_factory=deque)
    _under_way: dict[int, dict[int, RequestLine]] = field(default_factory=dict)
    _losses: Counter[int] = field(default_factory=Counter)

    def answers(self, lines: Iterable[RequestLine]) -> Generator[list[Answer], None, None]:
        """Answers as they come. Raises SpeqError where a worker fails, or too many are lost."""
        waiting = iter(lines)
        while True:
            while self.workers.idle and (block := self._next(waiting)):
                self._under_way[self.workers.give(block)] = {each.number: each for each in block}
            if not self._under_way:
                return
            news = self.workers.wait()
            left = self._under_way[news.worker]
            for answer in news.answers:
                del left[answer.number]
            if news.answers:
                yield news.answers
            if news.lost is not None:
                self._take_back([*left.values()], news.lost)
            if news.ended or news.lost is not None:
                del self._under_way[news.worker]

    def _next(self, waiting: Iterator[RequestLine]) -> list[RequestLine]:
        """A block: of what was lost first."""
        again = [self._again.popleft() for _ in range(min(len(self._again), self.block_requests))]
        return again or [*islice(waiting, self.block_requests)]

    def _take_back(self, lines: list[RequestLine], reason: str) -> None:
        for line in lines:
            self._losses[line.number] += 1
            if self._losses[line.number] == MOST_LOSSES:
                raise SpeqError(
                    f"{MOST_LOSSES} replicas were lost while they answered the request in line "
                    f"{line.line} ({reason}); see whether they have memory enough, and give the "
                    "command again: answers so far are kept"
                )
        self._again.extend(lines)


def block_requests(left: int, workers: int, max_batch: int) -> int:
    """Requests of a block: many, as a worker runs fewer side by side at the end of one; and no more
    than all workers get of what is left.
    """
    return max(min(8 * max_batch, -(-left // workers)), 1)
