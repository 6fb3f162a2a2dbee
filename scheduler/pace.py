"""How many prefetches keep a link busy until somebody looks after it again."""

import math

from speq.scheduler.transfer import Ticket

# Of a new measurement, so much counts.
WEIGHT = 0.2
# Under way at least, so that no reader waits, and at most: later ones may be more urgent.
FEWEST, MOST = 4, 64


class LinkPace:
    """Measures what the link takes for an expert, and how often it is looked after."""

    def __init__(self) -> None:
        self._transfer_s = 0.0
        self._gap_s = 0.0
        self._ended_s = -math.inf
        self._looked_s: float | None = None

    def ended(self, ticket: Ticket) -> None:
        """Take the measure of a transfer that is done: the time the link had for it alone."""
        alone_s = ticket.end_s - max(ticket.start_s, self._ended_s)
        self._ended_s = max(self._ended_s, ticket.end_s)
        if alone_s > 0:
            self._transfer_s += WEIGHT * (alone_s - self._transfer_s)

    def pause(self) -> None:
        """What passes until the next look is no gap: nothing is prefetched meanwhile."""
        self._looked_s = None

    def look(self, now_s: float) -> int:
        """How many prefetches may be under way from now on."""
        if self._looked_s is not None:
            self._gap_s += WEIGHT * (now_s - self._looked_s - self._gap_s)
        self._looked_s = now_s
        if not self._transfer_s:
            return FEWEST
        return min(FEWEST + math.ceil(self._gap_s / self._transfer_s), MOST)
