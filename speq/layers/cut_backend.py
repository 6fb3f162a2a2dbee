"""Experts that the host runs between the pieces of a recorded pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from speq.layers.offloaded_experts import ExpertBackend
from speq.routing import Route


class PassedLayer(NamedTuple):
    """A MoE layer that ran without the host: its number, its route, and when its experts ran, in
    seconds of perf_counter.
    """

    layer: int
    route: Route
    start_s: float
    end_s: float


class CutBackend:
    """A backend whose calls are placed in a recording.

    drafts  as the backend's
    """

    def __init__(self, backend: ExpertBackend, cut: Callable[[Callable[[], None]], None]) -> None:
        """cut: places host work at this point of the recording"""
        self._backend, self._cut = backend, cut
        self.drafts = backend.drafts

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        # No reference to this object, which the recording holds: that would be a cycle.
        backend, output = self._backend, torch.empty_like(hidden_states)

        def serve() -> None:
            # A new route each time, since routes are kept and hold host copies.
            output.copy_(backend(layer, hidden_states, again(route)))

        self._cut(serve)
        return output


@runtime_checkable
class IssuedExperts(ExpertBackend, Protocol):
    """Experts that may run without the host: in a pass that is `straight` it decides nothing but
    what to do about missing experts.
    """

    @property
    def straight(self) -> bool: ...

    def slot_table(self, layer: int) -> Tensor | None:
        """Slots of a layer's experts [E] int64, negative for missing ones; always the same tensor.
        None: no expert is ever missing, or the backend never runs straight.
        """

    def issue(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """Call the ops of a layer's experts, none of which is missing: [T, H] in, [T, H] out."""

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        """Take note of the layers of a pass that ran without the host."""


def again(route: Route) -> Route:
    """A route of what the router's tensors hold now. In host memory these are copied: they would
    be the route's host copies, and the next pass writes to them.
    """
    if not route.topk_ids.is_cpu:
        return replace(route)
    logits = route.router_logits
    return replace(
        route,
        topk_ids=route.topk_ids.clone(),
        topk_weights=route.topk_weights.clone(),
        router_logits=None if logits is None else logits.clone(),
    )
