"""Joins the experts of further devices with those that the host computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from speq.engine.host_compute import HostCompute
from speq.errors import present
from speq.layers.peer_experts import PeerExperts
from speq.routing import Route
from speq.scheduler.peer_devices import PeerDevices, PeerSlot
from speq.stats import Recorder


class PeerCompute:
    """Experts that further devices compute, and those of the host, if it has any.

    peers    compute the experts of each device; devices: what these hold
    """

    def __init__(
        self,
        peers: Sequence[PeerExperts],
        devices: PeerDevices,
        recorder: Recorder,
        host: HostCompute | None,
    ) -> None:
        self._peers, self._devices = peers, devices
        self._recorder, self._host = recorder, host
        self._launched: list[PeerExperts] = []
        self._there: set[int] = set()

    @contextmanager
    def allowed(self, hidden_states: Tensor, route: Route) -> Iterator[None]:
        """Inside the block, the layer of these rows [T, H] may have such experts."""
        self._launched, self._there = [], set()

        def launch(layer: int, places: dict[int, PeerSlot]) -> None:
            self._there = set(places)
            for at, peer in enumerate(self._peers):
                slots = {expert: place.slot for expert, place in places.items() if place.peer == at}
                if slots:
                    peer.launch(layer, hidden_states, route, slots)
                    self._launched.append(peer)

        devices = self._devices
        devices.launch = launch if len(hidden_states) <= devices.most_rows else None
        host = nullcontext() if self._host is None else self._host.allowed(hidden_states, route)
        try:
            with host:
                yield
        finally:
            devices.launch = None

    def run(self, layer: int, route: Route, experts: Sequence[int], outputs: Tensor) -> None:
        """Write the outputs of some experts of a route [T, K, H], at their places."""
        # A layer of more rows than they may have leaves the host experts that devices hold.
        others = [each for each in experts if each not in self._there]
        if others:
            present(self._host, "experts were not served").run(layer, route, others, outputs)
        for peer in self._launched:
            peer.collect(outputs)
        self._recorder.step.peer_experts += len(experts) - len(others)
