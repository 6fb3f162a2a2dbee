"""Readers that bring exact routes to the host, which loads their experts."""

from typing import Protocol

from speq.devices.device import Accelerator
from speq.devices.staged import Readback
from speq.routing import Route, RoutePrediction, top_experts


class RouteReader(Protocol):
    def read(self, route: Route, predict_next_layer: bool) -> None:
        """Bring a route's experts to the host.

        predict_next_layer  also bring the predicted experts of the next layer
        """


class HostRoutes:
    """Routes in host memory."""

    def read(self, route: Route, predict_next_layer: bool) -> None:
        pass


class DeviceRoutes:
    """Routes of an accelerator: ids, weights and the prediction for all rows, in one read."""

    def __init__(self, device: Accelerator) -> None:
        self._readback = Readback(device)

    def read(self, route: Route, predict_next_layer: bool) -> None:
        if not predict_next_layer or route.next_router is None:
            host_ids, host_weights = self._readback.read(route.topk_ids, route.topk_weights)
            route.was_read(host_ids, host_weights, None)
            return
        rows, top_k = route.topk_ids.shape
        prediction = top_experts(route.next_router([*range(rows)]), top_k)
        host_ids, host_weights, ids, margins = self._readback.read(
            route.topk_ids, route.topk_weights, *prediction
        )
        route.was_read(host_ids, host_weights, RoutePrediction(ids.tolist(), margins.tolist()))
