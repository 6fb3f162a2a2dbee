"""The module that takes the place of a MoE block's `experts` while the model is built.

It owns no weights. The pass under way chooses which experts it runs: the INT4 draft's or the exact
ones. Draft and target are one network with several expert banks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speq.errors import Broken, present
from speq.kernels.ops import ExpertBiases
from speq.routing import Route

# Finds logits [T, E] in what a router returns.
LogitsOf = Callable[[tuple[Tensor, ...]], Tensor]


def first_of(output: tuple[Tensor, ...]) -> Tensor:
    """Of routers that return their logits first."""
    return output[0]


def log_of_first(output: tuple[Tensor, ...]) -> Tensor:
    """Of routers that return probabilities first, whose logarithms are logits as good."""
    return output[0].log()


class ExpertBackend(Protocol):
    """One set of experts for all MoE layers.

    drafts  whether passes over it draft, and so run the draft's dense layers, where it has any
    """

    @property
    def drafts(self) -> bool: ...

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """[T, H] in, the weighted sum of each row's experts [T, H] out."""


class ActiveBackend:
    """Holds the bank that the pass under way uses; all layers of a model share it.

    drafting  whether that bank drafts
    """

    def __init__(self) -> None:
        self.backend: ExpertBackend | None = None
        self.drafting = False

    def use(self, backend: ExpertBackend | None) -> None:
        """Begin a pass over a bank, or end one."""
        self.backend = backend
        self.drafting = backend is not None and backend.drafts


class OffloadedExperts(nn.Module):
    """Replaces a family's `XExperts`; blocks call it with (hidden_states [T, H], ids, weights)."""

    # Of its experts; None: they have none.
    biases: ExpertBiases | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._is_hf_initialized = True  # keeps the family's weight initialisation away
        self.layer = -1
        self.switch = ActiveBackend()
        # Of the pass under way what the router was given, and its logits: a list, as an attribute
        # of a module is slow to set.
        self._heard: list[tuple[Tensor | None, Tensor]] = []
        self._logits_of: LogitsOf = first_of
        self._next_logits: Callable[[Tensor], Tensor] | None = None

    def attach(
        self,
        layer: int,
        switch: ActiveBackend,
        router: nn.Module,
        next_logits: Callable[[Tensor], Tensor] | None,
        logits_of: LogitsOf = first_of,
    ) -> None:
        """Make this module MoE layer number `layer`, under `switch`, and listen to its router.

        next_logits  what the router of the layer behind it says of rows; no module, which would
                     become a child of this one
        logits_of    finds logits in what a router returns
        """
        self.layer = layer
        self.switch = switch
        self._next_logits = next_logits
        self._logits_of = logits_of
        router.register_forward_hook(self._keep_logits)

    def _keep_logits(self, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        rows = args[0] if args else None
        self._heard[:] = [(rows, self._logits_of(output))]

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        backend = self.switch.backend
        if backend is None:
            raise Broken("a pass runs experts and has chosen none")
        rows, logits = self._heard.pop() if self._heard else (None, None)
        # Routers may look at rows that experts are given through a norm.
        asked = rows if rows is not None and rows.shape == hidden_states.shape else hidden_states
        following = partial(self._foresee, asked) if self._next_logits else None
        route = Route(topk_ids, topk_weights, logits, following)
        return backend(self.layer, hidden_states, route)

    @torch.inference_mode()
    def _foresee(self, hidden_states: Tensor, rows: list[int]) -> Tensor:
        next_logits = present(self._next_logits, "the last layer foresees no other")
        # All rows need no index, which an accelerator would have to be sent.
        asked = hidden_states if len(rows) == len(hidden_states) else hidden_states[rows]
        return next_logits(asked)


class BiasedExperts(OffloadedExperts):
    """Of experts that have biases, which it does own: they are small, and every pass adds some.

    Parameters have the names that `GptOssExperts` gives them, so that they are loaded as others
    are. Those of gate and up take turns there.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        count, width = config.num_local_experts, config.intermediate_size
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
        self.down_proj_bias = nn.Parameter(torch.empty(count, config.hidden_size))

    def attach(
        self,
        layer: int,
        switch: ActiveBackend,
        router: nn.Module,
        next_logits: Callable[[Tensor], Tensor] | None,
        logits_of: LogitsOf = first_of,
    ) -> None:
        """Puts the biases of gate before those of up besides, as the kernels take them."""
        super().attach(layer, switch, router, next_logits, logits_of)
        if self.biases is not None:  # attached before
            return
        in_turns = self.gate_up_proj_bias.detach()
        apart = torch.cat([in_turns[:, 0::2], in_turns[:, 1::2]], dim=1)
        self.gate_up_proj_bias = nn.Parameter(apart, requires_grad=False)
        self.biases = ExpertBiases(apart, self.down_proj_bias.detach())
