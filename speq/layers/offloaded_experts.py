"""Module that replaces a MoE block's `experts` while the model is built.

It owns no weights. Each pass chooses the experts to run: the INT4 draft's or the exact ones. Draft
and target are one network with several expert backends.
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
    """Logits of routers that return them first."""
    return output[0]


def log_of_first(output: tuple[Tensor, ...]) -> Tensor:
    """Logits of routers that return probabilities first: their logarithms."""
    return output[0].log()


class ExpertBackend(Protocol):
    """One set of experts for all MoE layers.

    drafts  whether its passes are drafts, and so run the draft's dense layers, if any
    """

    @property
    def drafts(self) -> bool: ...

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        """[T, H] in, the weighted sum of each row's experts [T, H] out."""


class ActiveBackend:
    """The backend of the current pass, shared by all layers of a model.

    drafting  whether that backend drafts
    """

    def __init__(self) -> None:
        self.backend: ExpertBackend | None = None
        self.drafting = False

    def use(self, backend: ExpertBackend | None) -> None:
        """Begin a pass over a backend; None ends it."""
        self.backend = backend
        self.drafting = backend is not None and backend.drafts


class OffloadedExperts(nn.Module):
    """Replaces a family's `XExperts`; blocks call it with (hidden_states [T, H], ids, weights)."""

    # Biases of its experts; None: they have none.
    biases: ExpertBiases | None = None

    def __init__(self, config: Any, *, swiglu_limit: float | None = None) -> None:
        """swiglu_limit: of the layer's activation, which backends are given otherwise"""
        super().__init__()
        self._is_hf_initialized = True  # prevents the family's weight initialisation
        self.layer = -1
        self.switch = ActiveBackend()
        # Input and logits of the router in the current pass; a list, because an attribute of a
        # module is slow to set.
        self._router_output: list[tuple[Tensor | None, Tensor]] = []
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
        """Make this module MoE layer number `layer` under `switch`, and capture its router's
        logits.

        next_logits  computes the next layer's router logits of rows; not a module, which would
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
        self._router_output[:] = [(rows, self._logits_of(output))]

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        backend = self.switch.backend
        if backend is None:
            raise Broken("experts ran outside a pass")
        rows, logits = self._router_output.pop() if self._router_output else (None, None)
        # Routers may see rows before a norm or a projection that precedes the experts.
        asked = hidden_states if rows is None else rows.flatten(0, -2)
        following = partial(self._predict_next, asked) if self._next_logits else None
        route = Route(topk_ids, topk_weights, logits, following)
        return backend(self.layer, hidden_states, route)

    @torch.inference_mode()
    def _predict_next(self, hidden_states: Tensor, rows: list[int]) -> Tensor:
        next_logits = present(self._next_logits, "the last layer has no next layer to predict")
        # All rows need no index, which would have to be copied to an accelerator.
        asked = hidden_states if len(rows) == len(hidden_states) else hidden_states[rows]
        return next_logits(asked)


class BiasedExperts(OffloadedExperts):
    """Experts with biases, which it owns: they are small, and every pass needs them.

    Parameters have the names of `GptOssExperts`, so that they load like others. Biases of gate and
    up are interleaved there.
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
        """Attach, and put the biases of gate before those of up, as the kernels take them."""
        super().attach(layer, switch, router, next_logits, logits_of)
        if self.biases is not None:  # attached before
            return
        in_turns = self.gate_up_proj_bias.detach()
        apart = torch.cat([in_turns[:, 0::2], in_turns[:, 1::2]], dim=1)
        self.gate_up_proj_bias = nn.Parameter(apart, requires_grad=False)
        self.biases = ExpertBiases(apart, self.down_proj_bias.detach())
