"""Limits prefetches to the number that keeps a link busy until the scheduler's next call."""

import math

from speq.scheduler.transfer import TransferTicket

# Weight of a new measurement in the moving average.
WEIGHT = 0.2
# Fewest prefetches under way, so that no reader waits. Most, because later ones may be urgent.
FEWEST, MOST = 4, 64


class LinkThrottle:
    """Measures the link's time for an expert, and the time between two calls of `look`."""

    def __init__(self) -> None:
        self._transfer_s = 0.0
        self._gap_s = 0.0
        self._ended_s = -math.inf
        self._looked_s: float | None = None

    def ended(self, ticket: TransferTicket) -> None:
        """Measure the time that the link worked for a finished transfer alone."""
        alone_s = ticket.end_s - max(ticket.start_s, self._ended_s)
        self._ended_s = max(self._ended_s, ticket.end_s)
        if alone_s > 0:
            self._transfer_s += WEIGHT * (alone_s - self._transfer_s)

    @property
    def transfer_s(self) -> float:
        """Seconds of an expert over the link; 0 if none was measured."""
        return self._transfer_s

    def pause(self) -> None:
        """Ignore the time until the next `look`, since nothing is prefetched meanwhile."""
        self._looked_s = None

    def look(self, now_s: float) -> int:
        """Number of prefetches that may be under way from now on."""
        if self._looked_s is not None:
            self._gap_s += WEIGHT * (now_s - self._looked_s - self._gap_s)
        self._looked_s = now_s
        if not self._transfer_s:
            return FEWEST
        return min(FEWEST + math.ceil(self._gap_s / self._transfer_s), MOST)
