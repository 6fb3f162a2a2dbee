"""Backend of drafts that run INT4 experts: all of them, or the most used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speq.experts.int4 import Int4Arena
from speq.kernels import ops
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.cut_backend import PassedLayer
from speq.layers.gates import RouterGate
from speq.routing import Route

# Called with (token of the draft, layer, route) once the host can read the route.
OnRoute = Callable[[int, int, Route], None]


class DraftBackend(Protocol):
    """A backend for a draft's passes that reports their routes.

    drafts    see `ExpertBackend`
    on_route  called with (layer, route) during the pass, as soon as the router has run
    """

    on_route: Callable[[int, Route], None] | None

    @property
    def drafts(self) -> bool: ...

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """Map rows [T, H] to the weighted sum of each row's experts [T, H]."""


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """Experts of one layer that are held, [E] bool, and their number."""

    experts: Tensor
    count: int


class DraftExperts:
    """Backend that runs INT4 experts and reports their routes.

    If a row's expert is not in the arena, the row chooses again among the held experts of the
    layer, by its router's own rule. A layer that holds fewer than a row chooses runs all of them;
    with none, its experts add nothing. The host has no part in it, so passes can be recorded. The
    reported routes are the routers' choices among all experts.

    biases    biases of each layer's experts; empty if they have none
    gates     gates of the MoE layers, in order; unused if all experts are held
    kernel    runs all experts of a route; measurements may replace it
    on_route  called with (layer, route) during the pass, as soon as the router has run
    idle      tells whether nobody needs a route before the end of its pass
    """

    drafts: ClassVar[bool] = True

    def __init__(
        self,
        arena: Int4Arena,
        activations: Sequence[Activation],
        biases: Sequence[ExpertBiases] = (),
        gates: Sequence[RouterGate] = (),
    ) -> None:
        self.kernel: Callable[..., Tensor] = ops.moe_int4
        self._experts = arena.experts
        self._base_slots = arena.base_slots.unbind()
        self._activations = activations
        self._biases = biases
        self._gates = gates
        self._held = [_held_experts(of_layer) for of_layer in self._base_slots]
        self.on_route: Callable[[int, Route], None] | None = None
        self.idle: Callable[[], bool] = lambda: False

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        if self.on_route is not None:
            self.on_route(layer, route)
        return self.issue(layer, hidden_states, route)

    @property
    def straight(self) -> bool:
        return self.idle()

    def slot_table(self, layer: int) -> None:
        return None

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        if self.on_route is not None:
            for each in layers:
                self.on_route(each.layer, each.route)

    def issue(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        topk_ids, topk_weights = self._among_held(layer, route)
        if not topk_ids.shape[1]:
            return torch.zeros_like(hidden_states)
        return self.kernel(
            hidden_states,
            topk_ids,
            topk_weights,
            self._base_slots[layer],
            self._experts,
            self._activations[layer],
            *self._biases[layer : layer + 1],
        )

    @property
    def whole(self) -> bool:
        """True if all experts are held."""
        return all(held is None for held in self._held)

    def _among_held(self, layer: int, route: Route) -> tuple[Tensor, Tensor]:
        """Return ids and weights of a route among the held experts, [T, K], or fewer columns if
        fewer are held.
        """
        held = self._held[layer]
        if held is None:
            return route.topk_ids, route.topk_weights
        wanted = route.topk_ids.shape[1]
        top_k = min(wanted, held.count)
        ids, weights = self._gates[layer].choose(route.logits, held.experts, top_k)
        weights = weights.to(route.topk_weights.dtype)
        if top_k < wanted:
            return ids, weights
        # Rows whose experts are all held keep the router's weights.
        own = held.experts[route.topk_ids].all(-1, keepdim=True)
        return torch.where(own, route.topk_ids, ids), torch.where(own, route.topk_weights, weights)


def _held_experts(base_slots: Tensor) -> HeldExperts | None:
    """Find the held experts from a layer's base slots [E]; None if it has all."""
    experts = base_slots >= 0
    count = int(experts.sum())
    return None if count == len(base_slots) else HeldExperts(experts, count)
