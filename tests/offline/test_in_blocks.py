"""Blocks of requests: to workers that are idle, and to others where one was lost."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from speq.errors import SpeqError
from speq.offline.answer import Answer
from speq.offline.in_blocks import MOST_LOSSES, InBlocks, News, block_requests
from speq.offline.request_file import RequestLine


def lines_of(count: int) -> list[RequestLine]:
    return [RequestLine(number, number + 1, b"{}") for number in range(count)]


@dataclass
class FakeWorkers:
    """So many workers, each of which gives an answer at a time, the newest block's first.

    lost   numbers of blocks whose worker is lost after one answer, or at once
    given  the requests of each block
    """

    count: int
    lost: dict[int, int] = field(default_factory=dict)
    given: list[list[int]] = field(default_factory=list)
    under_way: dict[int, deque[int]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return len(self.under_way) < self.count

    def give(self, lines: list[RequestLine]) -> int:
        assert self.idle
        self.given.append([line.number for line in lines])
        self.under_way[len(self.given)] = deque(self.given[-1])
        return len(self.given)

    def wait(self) -> News:
        worker = max(self.under_way)
        waiting = self.under_way[worker]
        done = len(self.given[worker - 1]) - len(waiting)
        if self.lost.get(worker) == done:
            del self.under_way[worker]
            return News(worker, lost="its machine is gone")
        if not waiting:
            del self.under_way[worker]
            return News(worker, ended=True)
        return News(worker, [Answer(waiting.popleft(), {})])


def numbers(workers: FakeWorkers, requests: int, block: int) -> list[int]:
    made = InBlocks(workers, block).answers(lines_of(requests))
    return [answer.number for answers in made for answer in answers]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 2, 7, 100])
def test_each_request_is_answered_once(count: int, block: int) -> None:
    workers = FakeWorkers(count)
    assert sorted(numbers(workers, 20, block)) == [*range(20)]
    assert [number for each in workers.given for number in each] == [*range(20)]
    assert all(len(each) <= block for each in workers.given)


def test_what_a_lost_worker_had_goes_to_another_and_no_more() -> None:
    workers = FakeWorkers(2, lost={2: 1, 3: 0})
    assert sorted(numbers(workers, 12, 3)) == [*range(12)]
    # The second had answered number 3; the third nothing.
    assert workers.given[:4] == [[0, 1, 2], [3, 4, 5], [4, 5], [4, 5]]


def test_a_request_that_takes_its_workers_along_ends_the_job() -> None:
    workers = FakeWorkers(1, lost=dict.fromkeys(range(1, 9), 1))
    with pytest.raises(SpeqError, match=r"3 replicas were lost .* in line 4 \(its machine is gone"):
        numbers(workers, 9, 9)
    assert len(workers.given) == MOST_LOSSES


def test_no_requests_ask_no_worker() -> None:
    workers = FakeWorkers(3)
    assert numbers(workers, 0, 4) == []
    assert workers.given == []


@pytest.mark.parametrize(
    ("left", "workers", "max_batch", "wanted"),
    [(1000, 2, 8, 64), (10, 2, 8, 5), (11, 2, 8, 6), (1, 5, 8, 1), (1000, 2, 1, 8)],
)
def test_sizes_of_blocks(left: int, workers: int, max_batch: int, wanted: int) -> None:
    assert block_requests(left, workers, max_batch) == wanted
