"""Brings exact routes to the host, which serves their experts."""

from typing import Protocol

from speq.devices.device import Accelerator
from speq.devices.staged import Readback
from speq.routing import Guess, Route, leading


class RouteReader(Protocol):
    def read(self, route: Route, foresee: bool) -> None:
        """See that the host knows a route's experts.

        foresee  whether it will ask for those of the next layer as well
        """


class HostRoutes:
    """Routes that are in host memory."""

    def read(self, route: Route, foresee: bool) -> None:
        pass


class DeviceRoutes:
    """Routes of an accelerator: ids, weights and the guess for all rows, in one read."""

    def __init__(self, device: Accelerator) -> None:
        self._readback = Readback(device)

    def read(self, route: Route, foresee: bool) -> None:
        if not foresee or route.following is None:
            host_ids, host_weights = self._readback.read(route.topk_ids, route.topk_weights)
            route.was_read(host_ids, host_weights, None)
            return
        rows, top_k = route.topk_ids.shape
        guess = leading(route.following([*range(rows)]), top_k)
        host_ids, host_weights, ids, margins = self._readback.read(
            route.topk_ids, route.topk_weights, *guess
        )
        route.was_read(host_ids, host_weights, Guess(ids.tolist(), margins.tolist()))
