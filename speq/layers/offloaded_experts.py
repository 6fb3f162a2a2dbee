"""The module that takes the place of a MoE block's `experts` while the model is built.

It owns no weights. Which experts it runs, the INT4 draft's or the exact ones, is the choice of the
pass under way: draft and target are one network with two expert banks.
"""

from typing import Any, Protocol

from torch import Tensor, nn

from speq.routing import Route


class ExpertBank(Protocol):
    """One set of experts for all MoE layers."""

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """[T, H] in, the weighted sum of each row's experts [T, H] out."""


class BankSwitch:
    """Which bank the pass under way uses; shared by all layers of a model."""

    def __init__(self) -> None:
        self.bank: ExpertBank | None = None


class OffloadedExperts(nn.Module):
    """Replaces a family's `XExperts`; blocks call it with (hidden_states [T, H], ids, weights)."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self._is_hf_initialized = True  # keeps the family's weight initialisation away
        self.layer = -1
        self.switch = BankSwitch()
        self._router_logits: Tensor | None = None

    def attach(self, layer: int, switch: BankSwitch, router: nn.Module) -> None:
        """Make this MoE layer number `layer`, under `switch`, and listen to its router."""
        self.layer = layer
        self.switch = switch
        router.register_forward_hook(self._keep_logits)

    def _keep_logits(self, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        self._router_logits = output[0]

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        assert self.switch.bank is not None, "no bank was chosen for this pass"
        route = Route(topk_ids, topk_weights, self._router_logits)
        self._router_logits = None
        return self.switch.bank(self.layer, hidden_states, route)
