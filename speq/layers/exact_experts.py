"""The exact experts, run out of slots: the target's bank."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor

from speq.experts.slots import SlotExperts
from speq.kernels import ops
from speq.kernels.grouping import Grouping
from speq.routing import Route
from speq.stats import Recorder


class ExpertServer(Protocol):
    """Brings a layer's experts into slots."""

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once."""


class SlotTable:
    """[E] int64 on the device: the slot of each expert, or -1. Each wave fills it anew in place."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._host = torch.empty(num_experts, dtype=torch.int64)
        self._entries = self._host.numpy()  # shared memory: no torch op for each expert
        self._device = device

    def of(self, slots: dict[int, int]) -> Tensor:
        """The table of {expert: slot}."""
        self._entries.fill(-1)
        for expert, slot in slots.items():
            self._entries[expert] = slot
        return self._host.to(self._device)


class ExactExperts:
    """Runs rows grouped by expert, with experts out of a slot arena (MoE-SpeQ 3.4.4).

    server      brings experts into slots
    experts     the experts in the arena
    slot_table  their slots, filled anew for each wave
    on_route    told each layer's exact route
    """

    def __init__(
        self,
        server: ExpertServer,
        experts: SlotExperts,
        slot_table: SlotTable,
        activation: str,
        recorder: Recorder,
        on_route: Callable[[int, Route], None],
    ) -> None:
        self._server = server
        self._experts = experts
        self._slot_table = slot_table
        self._activation = activation
        self._recorder = recorder
        self._on_route = on_route

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self._on_route(layer, route)
        outputs = hidden_states.new_empty(*route.topk_ids.shape, hidden_states.shape[1])
        grouping = Grouping.of(route.topk_ids, route.topk_ids.cpu())
        waves = self._server.serve(layer, grouping.experts)
        # Experts stay pinned until `waves` is closed, and a traceback could keep this frame alive.
        with closing(waves), self._recorder.timed("layer", layer):
            for slots in waves:
                self._experts.run(
                    layer,
                    hidden_states,
                    grouping,
                    slots,
                    self._slot_table.of(slots),
                    self._activation,
                    outputs,
                )
        return ops.combine(outputs, route.topk_weights, hidden_states.dtype)
