"""Converts a device's event times to seconds of the recorder's clock."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from speq.devices.device import Accelerator, StreamEvent
from speq.stats import Recorder, TimeSpan

# Seconds after which both clocks are read again: a device counts in float32 milliseconds.
ANCHOR_S = 30.0


@dataclass(frozen=True, slots=True)
class Pending:
    """A block of work on the compute stream, recorded once it has ended."""

    kind: str
    layer: int | None
    expert: int | None
    ahead: bool
    start: StreamEvent
    end: StreamEvent


class DeviceClock:
    """Times blocks of a device's work, which run after they were launched."""

    def __init__(self, device: Accelerator, recorder: Recorder) -> None:
        self.recorder = recorder
        self._device = device
        self._pending: deque[Pending] = deque()
        self.anchor()

    def anchor(self) -> None:
        """Read both clocks at once. The host waits for the device."""
        event = self._device.compute.record()
        event.wait()  # other threads use the previous anchor meanwhile
        self._event, self._at_s = event, self.recorder.clock()

    @property
    def is_old(self) -> bool:
        """True if both clocks should be read again."""
        return self.recorder.clock() - self._at_s > ANCHOR_S

    def seconds(self, event: StreamEvent) -> float:
        """Time at which the device reached a finished event."""
        return self._at_s + self._device.elapsed_s(self._event, event)

    @contextmanager
    def timed(
        self, kind: str, layer: int | None = None, expert: int | None = None, ahead: bool = False
    ) -> Iterator[None]:
        """Time the work that the block gives to the compute stream."""
        start = self._device.compute.record()
        try:
            yield
        finally:
            end = self._device.compute.record()
            self._pending.append(Pending(kind, layer, expert, ahead, start, end))

    def tell(self) -> None:
        """Record the blocks that have ended since the last call."""
        while self._pending and self._pending[0].end.done():
            past = self._pending.popleft()
            start_s, end_s = self.seconds(past.start), self.seconds(past.end)
            span = TimeSpan(past.kind, start_s, end_s, past.layer, past.expert, ahead=past.ahead)
            self.recorder.add(span)
