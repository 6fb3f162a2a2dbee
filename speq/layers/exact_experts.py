"""Backend of the target: the exact experts, run out of expert slots."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import ClassVar, Protocol

from torch import Tensor

from speq.errors import present
from speq.experts.slots import SlotExperts
from speq.kernels import decoder_ops
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.cut_backend import PassedLayer
from speq.layers.route_reader import RouteReader
from speq.layers.slot_table import SlotTable
from speq.routing import Route
from speq.stats import Timed


class ExpertServer(Protocol):
    """Loads a layer's experts into slots.

    predicts_next_layer  whether it asks routes for the experts of the next layer
    """

    @property
    def predicts_next_layer(self) -> bool: ...

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together contain each of `experts` once, but for those
        that the host computes.
        """


class HostServer(Protocol):
    """Experts that come into no slot: those that the host computes, or further devices."""

    def allowed(self, hidden_states: Tensor, route: Route) -> AbstractContextManager[None]:
        """Inside the block, the layer of these rows [T, H] may have such experts."""

    def run(self, layer: int, route: Route, experts: Sequence[int], outputs: Tensor) -> None:
        """Write the outputs of some experts of a route [T, K, H], at their places."""


class FoundSlots(Protocol):
    """Slots that a pass finds its experts in by itself.

    straight  whether the host decides nothing but what to do about missing experts
    tables    by layer, the slot of each expert [E] int64, negative for missing ones
    """

    @property
    def straight(self) -> bool: ...

    @property
    def tables(self) -> Sequence[Tensor]: ...

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        """Take note of layers that ran without the host."""


class ExactExperts:
    """Runs rows grouped by expert, with experts out of a slot arena (MoE-SpeQ 3.4.4).

    server      loads experts into slots
    experts     the experts in the arena; measurements may replace them
    slot_table  their slots, rewritten for each wave
    routes      brings routes to the host
    timed       timer of a layer's experts
    biases      biases of each layer's experts; empty if they have none
    resident    where passes find experts by themselves; None: the host tells each layer
    on_route    called with each layer's exact route; returns the route to serve, which may drop
                rows, or have other experts under an expert budget
    host        computes experts where they lie; None: all go through slots
    """

    drafts: ClassVar[bool] = False

    def __init__(
        self,
        server: ExpertServer,
        experts: SlotExperts,
        slot_table: SlotTable,
        routes: RouteReader,
        activations: Sequence[Activation],
        timed: Timed,
        on_route: Callable[[int, Route], Route],
        biases: Sequence[ExpertBiases] = (),
        resident: FoundSlots | None = None,
        host: HostServer | None = None,
    ) -> None:
        self._server = server
        self.experts = experts
        self._slot_table = slot_table
        self._routes = routes
        self._activations = activations
        self._timed = timed
        self._on_route = on_route
        self._biases = biases
        self._resident = resident
        self._host = host

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self._routes.read(route, self._server.predicts_next_layer)
        route = self._on_route(layer, route)
        outputs = self.outputs(layer, hidden_states, route)
        return decoder_ops.combine(outputs, route.topk_weights, hidden_states.dtype)

    def outputs(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """Compute the unweighted output of each expert of a route for its row: [T, K, H]; 0 for
        experts that are left out.
        """
        # Pruned rows come out as the output of some of their experts, or as 0: it must be finite,
        # since other rows mask it.
        whole = route.active_rows is None and not route.left_out
        made = hidden_states.new_empty if whole else hidden_states.new_zeros
        outputs = made(*route.topk_ids.shape, hidden_states.shape[1])
        grouping = Grouping.of(route.topk_ids, route.host_ids, route.active_rows, route.left_out)
        if not grouping.experts:
            return outputs
        waves = self._server.serve(layer, grouping.experts)
        biases = self._biases[layer] if self._biases else None
        left = set(grouping.experts)
        allowed = nullcontext() if self._host is None else self._host.allowed(hidden_states, route)
        # Experts stay pinned until `waves` is closed, and a traceback could keep this frame alive.
        with allowed, closing(waves), self._timed("layer", layer):
            for slots in waves:
                left.difference_update(slots)
                self.experts.run(
                    layer,
                    hidden_states,
                    grouping,
                    slots,
                    self._slot_table.of(slots),
                    self._activations[layer],
                    outputs,
                    biases,
                )
            if left:
                # The device copies and computes what was asked for above.
                beside = present(self._host, "experts were not served")
                beside.run(layer, route, sorted(left), outputs)
        return outputs

    @property
    def straight(self) -> bool:
        return self._resident is not None and self._resident.straight

    def slot_table(self, layer: int) -> Tensor | None:
        return None if self._resident is None else self._resident.tables[layer]

    def issue(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        outputs = hidden_states.new_empty(*route.topk_ids.shape, hidden_states.shape[1])
        table = self.slot_table(layer)
        self.experts.run(
            layer,
            hidden_states,
            Grouping(route.topk_ids, [], {}, None),
            {},
            self._slot_table.of({}) if table is None else table,
            self._activations[layer],
            outputs,
            self._biases[layer] if self._biases else None,
        )
        return decoder_ops.combine(outputs, route.topk_weights, hidden_states.dtype)

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        present(self._resident, "experts ran straight that the host has to serve").passed(layers)
