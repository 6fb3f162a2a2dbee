"""When a device was where in its work, in seconds of the recorder's clock."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from speq.devices.device import Accelerator, StreamEvent
from speq.stats import Event as TimeSpan
from speq.stats import Recorder

# Seconds after which both clocks are read anew: a device counts in float32 milliseconds.
ANCHOR_S = 30.0


@dataclass(frozen=True, slots=True)
class Pending:
    """A block of work on the compute stream, of which the recorder is told when it has ended."""

    kind: str
    layer: int | None
    expert: int | None
    ahead: bool
    start: StreamEvent
    end: StreamEvent


class DeviceClock:
    """Times blocks of a device's work, which begin and end long after they were asked for."""

    def __init__(self, device: Accelerator, recorder: Recorder) -> None:
        self.recorder = recorder
        self._device = device
        self._pending: deque[Pending] = deque()
        self.anchor()

    def anchor(self) -> None:
        """Read both clocks at once. The host waits for the device."""
        event = self._device.compute.record()
        event.wait()  # who works meanwhile goes by the one before
        self._event, self._at_s = event, self.recorder.clock()

    @property
    def is_old(self) -> bool:
        """Whether it is time to read both clocks again."""
        return self.recorder.clock() - self._at_s > ANCHOR_S

    def seconds(self, event: StreamEvent) -> float:
        """When the device was at an event that is done."""
        return self._at_s + self._device.elapsed_s(self._event, event)

    @contextmanager
    def timed(
        self, kind: str, layer: int | None = None, expert: int | None = None, ahead: bool = False
    ) -> Iterator[None]:
        """Have the device time what the block gives to its compute stream."""
        start = self._device.compute.record()
        try:
            yield
        finally:
            end = self._device.compute.record()
            self._pending.append(Pending(kind, layer, expert, ahead, start, end))

    def tell(self) -> None:
        """Tell the recorder of blocks that have ended since."""
        while self._pending and self._pending[0].end.done():
            past = self._pending.popleft()
            start_s, end_s = self.seconds(past.start), self.seconds(past.end)
            span = TimeSpan(past.kind, start_s, end_s, past.layer, past.expert, ahead=past.ahead)
            self.recorder.add(span)
