"""The INT4 experts that are held, all of them or the most used: the draft's bank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speq.experts.int4 import Int4Arena
from speq.kernels import ops
from speq.kernels.ops import ExpertBiases
from speq.layers.gates import Gate
from speq.routing import Route

# Told (token of the draft, layer, route) when the host can know of it.
OnRoute = Callable[[int, int, Route], None]


class DraftBackend(Protocol):
    """Experts that a draft's passes run, and that report their routes.

    drafts    as `ExpertBackend` has it
    on_route  told (layer, route) as soon as a router has spoken, in the midst of the pass
    """

    on_route: Callable[[int, Route], None] | None

    @property
    def drafts(self) -> bool: ...

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """[T, H] in, the weighted sum of each row's experts [T, H] out."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one layer: which experts are held, [E] bool, and how many."""

    experts: Tensor
    count: int


class DraftExperts:
    """Runs INT4 experts and reports their routes.

    Where an arena lacks some experts of a layer, a row that wants one of these chooses again among
    those that are held, by its router's own rule. A layer that holds fewer than a row chooses runs
    all of them, and one that holds none adds nothing to what lies beside the experts. The host has
    no part in it, so that passes can be recorded. What is reported is what the routers chose among
    all experts.

    biases    of the experts of each layer; empty where they have none
    gates     of the MoE layers, in order; not asked where all experts are held
    kernel    what runs all experts of a route; measurements may put another one in its place
    on_route  told (layer, route) as soon as a router has spoken, in the midst of the pass
    """

    drafts: ClassVar[bool] = True

    def __init__(
        self,
        arena: Int4Arena,
        activation: str,
        biases: Sequence[ExpertBiases] = (),
        gates: Sequence[Gate] = (),
    ) -> None:
        self.kernel: Callable[..., Tensor] = ops.moe_int4
        self._backend = arena.backend
        self._base_slots = arena.base_slots.unbind()
        self._activation = activation
        self._biases = biases
        self._gates = gates
        self._held = [_held(of_layer) for of_layer in self._base_slots]
        self.on_route: Callable[[int, Route], None] | None = None

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        if self.on_route is not None:
            self.on_route(layer, route)
        topk_ids, topk_weights = self._among_held(layer, route)
        if not topk_ids.shape[1]:
            return torch.zeros_like(hidden_states)
        return self.kernel(
            hidden_states,
            topk_ids,
            topk_weights,
            self._base_slots[layer],
            self._backend,
            self._activation,
            *self._biases[layer : layer + 1],
        )

    @property
    def whole(self) -> bool:
        """Whether all experts are held."""
        return all(held is None for held in self._held)

    def _among_held(self, layer: int, route: Route) -> tuple[Tensor, Tensor]:
        """ids and weights of a route as it is run, [T, K] or fewer where fewer are held."""
        held = self._held[layer]
        if held is None:
            return route.topk_ids, route.topk_weights
        wanted = route.topk_ids.shape[1]
        top_k = min(wanted, held.count)
        ids, weights = self._gates[layer].choose(route.logits, held.experts, top_k)
        weights = weights.to(route.topk_weights.dtype)
        if top_k < wanted:
            return ids, weights
        # Rows that lack nothing keep what their router gave them.
        own = held.experts[route.topk_ids].all(-1, keepdim=True)
        return torch.where(own, route.topk_ids, ids), torch.where(own, route.topk_weights, weights)


def _held(base_slots: Tensor) -> Held | None:
    """By a layer's [E] base slots; None where it has all."""
    experts = base_slots >= 0
    count = int(experts.sum())
    return None if count == len(base_slots) else Held(experts, count)
