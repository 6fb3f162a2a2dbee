"""The device's clock on a device of three events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from speq.scheduler.device_clock import DeviceClock
from speq.stats import Recorder


@dataclass
class FakeEvent:
    device: "FakeDevice"
    at_s: float
    is_done: bool = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.device.meanwhile()
        self.is_done = True


@dataclass
class FakeDevice:
    """Its own clock is 100 s ahead of the host's."""

    now_s: float = 0.0
    meanwhile: Callable[[], None] = lambda: None
    events: list[FakeEvent] = field(default_factory=list)

    @property
    def compute(self) -> "FakeDevice":
        return self

    def record(self) -> FakeEvent:
        self.events.append(FakeEvent(self, self.now_s + 100))
        return self.events[-1]

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.is_done and end.is_done, "an event that is not done"
        return end.at_s - start.at_s


def test_who_works_while_clocks_are_read_goes_by_the_last_reading() -> None:
    """Spans are told while the host waits: the event that it waits for is no anchor yet."""
    device: Any = FakeDevice()
    clock = DeviceClock(device, Recorder(lambda: device.now_s))
    device.now_s = 40.0
    past = device.record()
    past.is_done = True
    told: list[float] = []
    device.meanwhile = lambda: told.append(clock.seconds(past))
    device.now_s = 50.0
    clock.anchor()
    assert told == [pytest.approx(40.0)]
    assert clock.seconds(past) == pytest.approx(40.0)
