"""Has the experts a layer needs in slots when it computes.

`OnDemand` fetches what is missing when it is asked for, as Mixtral-Offloading does: the baseline
(`--prefetch none`) that everything cleverer is compared with.
"""

from collections.abc import Generator

from speq.routing import Route
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.supply import ExpertSupply


class OnDemand:
    """Serve a layer's experts out of the slots, fetching those that are missing."""

    def __init__(self, supply: ExpertSupply, lookahead: LookaheadBuffer) -> None:
        self.lookahead = lookahead
        self._supply = supply

    def request(self, token: int, layer: int, route: Route) -> None:
        """A draft's route, as soon as it is known. Recorded; nothing is fetched ahead."""
        self.lookahead.record(token, layer, route)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once."""
        return self._supply.serve(layer, experts)
