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
    """Routes of an accelerator: ids, and the guess for all rows, in one read."""

    def __init__(self, device: Accelerator) -> None:
        self._readback = Readback(device)

    def read(self, route: Route, foresee: bool) -> None:
        if not foresee or route.following is None:
            (host_ids,) = self._readback.read(route.topk_ids)
            route.was_read(host_ids, None)
            return
        rows, top_k = route.topk_ids.shape
        guess = leading(route.following([*range(rows)]), top_k)
        host_ids, ids, margins = self._readback.read(route.topk_ids, *guess)
        route.was_read(host_ids, Guess(ids.tolist(), margins.tolist()))
