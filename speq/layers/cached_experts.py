"""Backend of drafts that run only the exact experts in expert slots, at no cost in memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speq.experts.slots import SlotExperts
from speq.kernels import decoder_ops
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.gates import RouterGate
from speq.layers.route_reader import RouteReader
from speq.layers.slot_table import SlotTable
from speq.routing import Route


class Lender(Protocol):
    """The part of `ExpertLoader` that this backend uses."""

    def residents(self, layer: int, experts: Sequence[int]) -> list[int]: ...

    def lend(
        self, layer: int, experts: Sequence[int]
    ) -> AbstractContextManager[dict[int, int]]: ...


class CachedExperts:
    """Backend that runs the experts in slots: each row chooses again among those, by its router's
    own rule.

    A layer with fewer residents than a row chooses runs those; with none, its experts add nothing.
    No bytes are moved.

    lender      knows which experts are in slots, and pins them
    experts     the experts in the arena
    slot_table  their slots
    routes      brings routes to the host
    gates       of the MoE layers, in order
    biases      biases of their experts; empty if they have none
    on_route    called during the pass with (layer, route), the routers' choice among all experts.
                Experts that it fetches go to other slots than those in use.
    """

    drafts: ClassVar[bool] = False

    def __init__(
        self,
        lender: Lender,
        experts: SlotExperts,
        slot_table: SlotTable,
        routes: RouteReader,
        gates: Sequence[RouterGate],
        activations: Sequence[Activation],
        biases: Sequence[ExpertBiases] = (),
    ) -> None:
        self._lender = lender
        self._experts = experts
        self._slot_table = slot_table
        self._routes = routes
        self._gates = gates
        self._activations = activations
        self._biases = biases
        self.on_route: Callable[[int, Route], None] | None = None

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self._routes.read(route, predict_next_layer=False)
        served = self._among_residents(layer, route)
        wanted = [] if served is None else served.experts
        with self._lender.lend(layer, wanted) as slots:
            if self.on_route is not None:
                self.on_route(layer, route)
            if served is None:
                return torch.zeros_like(hidden_states)
            outputs = hidden_states.new_empty(*served.topk_ids.shape, hidden_states.shape[1])
            self._experts.run(
                layer,
                hidden_states,
                Grouping.of(served.topk_ids, served.host_ids),
                slots,
                self._slot_table.of(slots),
                self._activations[layer],
                outputs,
                *self._biases[layer : layer + 1],
            )
        return decoder_ops.combine(outputs, served.topk_weights, hidden_states.dtype)

    def _among_residents(self, layer: int, route: Route) -> Route | None:
        """Route among the experts in slots; None if there are none."""
        num_experts = route.logits.shape[1]
        residents = self._lender.residents(layer, range(num_experts))
        if not residents:
            return None
        if set(route.experts) <= set(residents):
            return route
        allowed = torch.zeros(num_experts, dtype=torch.bool)
        allowed[residents] = True
        top_k = min(route.topk_ids.shape[1], len(residents))
        return route.instead(*self._gates[layer].choose(route.logits.cpu(), allowed, top_k))
