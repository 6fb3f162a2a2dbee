"""The simulated link against one that is carried on tick by tick."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from speq.bench.replay.simulated_link import SimulatedClock, SimulatedLink
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Priority, State, TransferTicket
from speq.stats import Recorder, TimeSpan

MOVED_BYTES = 1000


@dataclass(slots=True)
class Request:
    """turn: its place among all that was asked for or hastened."""

    number: int
    demand: bool
    turn: int
    length: int = 0
    left: int = 0
    start: int = 0


@dataclass(slots=True)
class Ticks:
    """The same link in whole seconds: what has begun is in hand, and the link serves its head."""

    begun: int
    length: Callable[[], int]
    now: int = 0
    turns: int = 0
    waiting: list[Request] = field(default_factory=list)
    hand: list[Request] = field(default_factory=list)
    done: list[tuple[int, int, int]] = field(default_factory=list)
    stalls: list[tuple[int, int, int]] = field(default_factory=list)

    def ask(self, number: int, demand: bool) -> None:
        self.turns += 1
        self.waiting.append(Request(number, demand, self.turns))
        self.take()

    def take(self) -> None:
        """Take in hand what may begin: demands first, one place being kept for them."""
        while self.waiting and len(self.hand) < self.begun:
            best = min(self.waiting, key=lambda request: (not request.demand, request.turn))
            prefetches = sum(not request.demand for request in self.hand)
            if not best.demand and prefetches == max(1, self.begun - 1):
                return
            self.waiting.remove(best)
            best.length = best.left = self.length()
            self.hand.append(best)

    def tick(self) -> None:
        if self.hand:
            head = self.hand[0]
            if head.left == head.length:
                head.start = self.now
            head.left -= 1
        self.now += 1
        if self.hand and not self.hand[0].left:
            ended = self.hand.pop(0)
            self.done.append((ended.number, ended.start, self.now))
            self.take()

    def is_open(self, number: int) -> bool:
        return any(request.number == number for request in self.waiting + self.hand)

    def hasten(self, number: int) -> None:
        for request in self.waiting + self.hand:
            if request.number == number and not request.demand:
                self.turns += 1
                request.demand, request.turn = True, self.turns
        self.take()

    def wait(self, number: int) -> None:
        start = self.now
        self.hasten(number)
        while self.is_open(number):
            self.tick()
        if self.now > start:
            self.stalls.append((number, start, self.now))

    def cancel(self, number: int) -> bool:
        held = [request for request in self.waiting if request.number == number]
        self.waiting = [request for request in self.waiting if request.number != number]
        return bool(held)


class Rig:
    """Both, asked for the same. length: seconds of the transfers, in the order they begin."""

    def __init__(self, begun: int, length: Callable[[], Callable[[], int]]) -> None:
        self.clock = SimulatedClock()
        self.recorder = Recorder(self.clock)
        self.step = self.recorder.begin("decode")
        self.link = SimulatedLink(self.clock, self.recorder, length(), MOVED_BYTES, begun)
        self.ticks = Ticks(begun, length())
        self.tickets: list[TransferTicket] = []

    def ask(self, demand: bool) -> TransferTicket:
        number = len(self.tickets)
        priority = Priority.DEMAND if demand else Priority.PREFETCH
        self.tickets.append(self.link.submit(ExpertKey(0, number), number, priority))
        self.ticks.ask(number, demand)
        return self.tickets[-1]

    def move_on(self, seconds: int) -> None:
        self.clock.now += seconds
        for _ in range(seconds):
            self.ticks.tick()

    def events(self, kind: str) -> list[tuple[int | None, float, float]]:
        events = [event for event in self.step.events if event.kind == kind]
        return [(event.expert, event.start_s, event.end_s) for event in events]

    def check(self) -> None:
        """All that has ended by now, and was told of, did so for both at the same times."""
        self.link.report()
        assert self.clock.now == self.ticks.now
        assert self.events("transfer") == self.ticks.done
        assert self.events("stall") == self.ticks.stalls


def constant(seconds: int) -> Callable[[], Callable[[], int]]:
    return lambda: lambda: seconds


def test_one_at_a_time_and_demands_before_prefetches() -> None:
    rig = Rig(2, constant(10))
    first, second = rig.ask(demand=False), rig.ask(demand=False)
    # Of two that may have begun one place is a demand's.
    assert (first.state, second.state) == (State.RUNNING, State.QUEUED)
    rig.move_on(3)
    third = rig.ask(demand=True)
    rig.link.wait(third)
    assert (third.start_s, third.end_s, rig.clock.now) == (10, 20, 20)
    # It is the prefetch's turn now, and what has begun is carried to its end.
    fourth = rig.ask(demand=False)
    rig.link.drain()
    assert (second.state, fourth.state) == (State.DONE, State.CANCELLED)
    assert rig.events("transfer") == [(0, 0, 10), (2, 10, 20), (1, 20, 30)]
    assert rig.events("stall") == [(2, 3, 20)]
    assert rig.clock.now == 30
    # Only what was asked for ahead counts as such.
    assert (rig.step.moved_bytes, rig.step.ahead_bytes) == (3 * MOVED_BYTES, 2 * MOVED_BYTES)
    assert rig.step.read_bytes == 3 * MOVED_BYTES


def test_what_has_begun_cannot_be_called_back() -> None:
    rig = Rig(3, constant(4))
    one, two, three = (rig.ask(demand=False) for _ in range(3))
    assert [rig.link.cancel(ticket) for ticket in (one, two, three)] == [False, False, True]
    assert three.state is State.CANCELLED
    assert not rig.link.cancel(three)
    rig.move_on(8)
    rig.link.report()
    assert [ticket.state for ticket in (one, two)] == [State.DONE, State.DONE]
    assert not rig.link.cancel(one)
    assert rig.events("transfer") == [(0, 0, 4), (1, 4, 8)]


def test_a_late_prefetch_stalls_as_one() -> None:
    rig = Rig(2, constant(10))
    ticket = rig.ask(demand=False)
    rig.move_on(4)
    rig.link.wait(ticket)
    rig.link.wait(ticket)  # what has arrived is not waited for
    assert [event for event in rig.step.events if event.kind == "stall"] == [
        TimeSpan("stall", 4, 10, 0, 0, ahead=True)
    ]
    assert (rig.step.stall_s, rig.step.late_s) == (6, 6)


def test_an_idle_link_begins_when_it_is_asked() -> None:
    """Not when it fell idle, though nobody looked after it since."""
    rig = Rig(2, constant(3))
    rig.ask(demand=False)
    rig.move_on(10)
    late = rig.ask(demand=False)
    assert late.state is State.RUNNING
    assert (late.start_s, late.end_s) == (10, 13)


def test_hastening_comes_too_late_for_the_past() -> None:
    """What waited is begun in its order up to now, though nobody looked."""
    rig = Rig(1, constant(3))
    tickets = [rig.ask(demand=False) for _ in range(3)]
    rig.move_on(4)
    rig.link.hasten(tickets[2])
    assert [ticket.state for ticket in tickets] == [State.DONE, State.RUNNING, State.QUEUED]
    rig.link.wait(tickets[2])
    assert (tickets[2].start_s, tickets[2].end_s) == (6, 9)


@pytest.mark.parametrize("looked_after", [True, False])
@pytest.mark.parametrize("begun", [1, 2, 3, 5])
def test_random_requests(begun: int, looked_after: bool) -> None:
    """looked_after: whether the link is told of every second that passes, as it passes."""
    for seed in range(40):

        def lengths(seed: int = seed) -> Callable[[], int]:
            source = random.Random(seed)
            return lambda: source.randint(1, 6)

        rng = random.Random(seed)
        rig = Rig(begun, lengths)
        for _ in range(60):
            turn = rng.random()
            # What was withdrawn is no more to be waited for.
            known = [t for t in rig.tickets if t.state is not State.CANCELLED]
            if turn < 0.4 or not known:
                rig.ask(demand=rng.random() < 0.4)
            elif turn < 0.65:
                rig.move_on(rng.randint(1, 9))
                if looked_after:
                    rig.check()
            else:
                ticket = rng.choice(known)
                if turn < 0.75:
                    rig.link.hasten(ticket)
                    rig.ticks.hasten(ticket.slot)
                elif turn < 0.85:
                    rig.link.wait(ticket)
                    rig.ticks.wait(ticket.slot)
                    assert ticket.state is State.DONE
                else:
                    assert rig.link.cancel(ticket) == rig.ticks.cancel(ticket.slot)
            if rng.random() < 0.3:
                rig.check()
        rig.link.drain()
        rig.ticks.waiting.clear()
        while rig.ticks.hand:
            rig.ticks.tick()
        rig.check()
        # The link has no two at a time, and none was lost.
        transfers = rig.events("transfer")
        assert all(one[2] <= other[1] for one, other in pairwise(transfers))
        states = [ticket.state for ticket in rig.tickets]
        assert set(states) <= {State.DONE, State.CANCELLED}
        assert states.count(State.DONE) == len(transfers)
