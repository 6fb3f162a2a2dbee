"""The INT4 experts, resident as a whole: the draft's bank."""

from collections.abc import Callable

from torch import Tensor

from speq.experts.int4 import Int4Arena
from speq.kernels import ops
from speq.routing import Route

# How INT4 experts run: all of a route in one call, or one call for each expert and projection.
KERNELS = {"fused": ops.moe_int4, "unfused": ops.moe_int4_unfused}
# Told (token of the draft, layer, route) as soon as a draft's router has spoken.
OnRoute = Callable[[int, int, Route], None]


class DraftExperts:
    """Runs INT4 experts and reports their routes; `begin` names the token being drafted."""

    def __init__(self, arena: Int4Arena, activation: str, kernel: str = "fused") -> None:
        self._bank = arena.bank
        self._base_slots = arena.base_slots.unbind()
        self.run = KERNELS[kernel]
        self._activation = activation
        self._token = 0
        self._on_route: OnRoute | None = None

    def begin(self, token: int, on_route: OnRoute | None) -> None:
        self._token = token
        self._on_route = on_route

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        if self._on_route is not None:
            self._on_route(self._token, layer, route)
        return self.run(
            hidden_states,
            route.topk_ids,
            route.topk_weights,
            self._base_slots[layer],
            self._bank,
            self._activation,
        )
