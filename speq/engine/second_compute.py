"""Joins the experts of a second device with those that the host computes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from speq.engine.host_compute import HostCompute
from speq.errors import present
from speq.layers.host_experts import MOST_ROWS
from speq.layers.second_experts import SecondExperts
from speq.routing import Route
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.second_device import SecondDevice
from speq.stats import Recorder


class SecondCompute:
    """Experts of few rows that a second device computes, and those of the host, if it has any."""

    def __init__(
        self,
        experts: SecondExperts,
        at: Mapping[ExpertKey, int],
        loader: ExpertLoader,
        recorder: Recorder,
        host: HostCompute | None,
    ) -> None:
        """at: slots of the experts on the second device"""
        self._experts, self._recorder, self._host = experts, recorder, host
        self._second = loader.second = SecondDevice(at)

    @contextmanager
    def allowed(self, hidden_states: Tensor, route: Route) -> Iterator[None]:
        """Inside the block, the layer of these rows [T, H] may have such experts."""

        def launch(layer: int, slots: dict[int, int]) -> None:
            self._experts.launch(layer, hidden_states, route, slots)

        self._second.launch = launch if len(hidden_states) <= MOST_ROWS else None
        host = nullcontext() if self._host is None else self._host.allowed(hidden_states, route)
        try:
            with host:
                yield
        finally:
            self._second.launch = None

    def run(self, layer: int, route: Route, experts: Sequence[int], outputs: Tensor) -> None:
        """Write the outputs of some experts of a route [T, K, H], at their places."""
        others = [each for each in experts if ExpertKey(layer, each) not in self._second.at]
        if others:
            present(self._host, "experts were not served").run(layer, route, others, outputs)
        if len(others) < len(experts):
            self._experts.collect(outputs)
            self._recorder.step.second_experts += len(experts) - len(others)
