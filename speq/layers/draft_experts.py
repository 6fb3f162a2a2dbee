"""The INT4 experts, resident as a whole: the draft's bank."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from speq.experts.int4 import Int4Arena
from speq.kernels import ops
from speq.kernels.ops import ExpertBiases
from speq.routing import Route

# Told (token of the draft, layer, route) when the host can know of it.
OnRoute = Callable[[int, int, Route], None]


class DraftBank(Protocol):
    """Experts that a draft's passes run, and that report their routes.

    drafts    as `ExpertBank` has it
    on_route  told (layer, route) as soon as a router has spoken, in the midst of the pass
    """

    on_route: Callable[[int, Route], None] | None

    @property
    def drafts(self) -> bool: ...

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """[T, H] in, the weighted sum of each row's experts [T, H] out."""


class DraftExperts:
    """Runs INT4 experts and reports their routes.

    biases    of the experts of each layer; empty where they have none
    kernel    what runs all experts of a route; measurements may put another one in its place
    on_route  told (layer, route) as soon as a router has spoken, in the midst of the pass
    """

    drafts: ClassVar[bool] = True

    def __init__(
        self, arena: Int4Arena, activation: str, biases: Sequence[ExpertBiases] = ()
    ) -> None:
        self.kernel: Callable[..., Tensor] = ops.moe_int4
        self._bank = arena.bank
        self._base_slots = arena.base_slots.unbind()
        self._activation = activation
        self._biases = biases
        self.on_route: Callable[[int, Route], None] | None = None

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        if self.on_route is not None:
            self.on_route(layer, route)
        return self.kernel(
            hidden_states,
            route.topk_ids,
            route.topk_weights,
            self._base_slots[layer],
            self._bank,
            self._activation,
            *self._biases[layer : layer + 1],
        )
