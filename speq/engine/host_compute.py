"""Joins the division of missing experts with the kernels that compute the host's share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from speq.kernels import library
from speq.kernels.grouping import most_fused_rows
from speq.layers.host_experts import HostExperts
from speq.routing import Route
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.host_share import HostShare, nothing
from speq.stats import Recorder, TimeSpan


class HostCompute:
    """Missing experts computed where they lie, for as many rows as our kernels run on the device:
    torch's products of more rows have an order of sums of their own.
    """

    def __init__(
        self, experts: HostExperts, loader: ExpertLoader, share: HostShare, recorder: Recorder
    ) -> None:
        self._experts, self._loader, self._share = experts, loader, share
        self._recorder = recorder
        loader.share = share

    @contextmanager
    def allowed(self, hidden_states: Tensor, route: Route) -> Iterator[None]:
        """Inside the block, the layer of these rows [T, H] may have such experts."""
        most_rows = most_fused_rows(library.kernels_for(hidden_states), route.topk_ids.shape[1])
        self._share.open = len(hidden_states) <= most_rows
        self._share.begin = partial(self._experts.begin, hidden_states)
        try:
            yield
        finally:
            self._share.open = False
            self._share.begin = nothing

    def run(self, layer: int, route: Route, experts: Sequence[int], outputs: Tensor) -> None:
        """Write the outputs of some experts of a route [T, K, H], at their places."""
        times = self._experts.run(layer, route, experts, outputs)
        self._share.computed(len(experts), times.compute_s, times.round_trip_s)
        self._recorder.add(TimeSpan("host", times.start_s, times.end_s, layer))
        self._recorder.step.host_experts += len(experts)
        self._loader.bring_later(layer, experts)
