"""Experts that a second device holds and computes, beside the device that runs the rest.

Rows go there through the host, and results come back the same way. Both devices have the same
kernels, so results are those of the first bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.devices.staged import Readback, Uploads
from speq.errors import present
from speq.experts.slots import SlotExperts
from speq.kernels.grouping import Grouping
from speq.kernels.ops import ExpertBiases
from speq.layers.slot_table import DeviceSlotTable
from speq.routing import Route


class SecondExperts:
    """Runs the experts of a second device for few rows of the first.

    device, second  where rows come from, and where the experts are
    experts         in the slots of the second device
    biases          biases of each layer's experts; empty if they have none
    """

    def __init__(
        self,
        device: Accelerator,
        second: Accelerator,
        experts: SlotExperts,
        num_experts: int,
        activation: str,
        biases: Sequence[ExpertBiases],
    ) -> None:
        self._on, self._experts, self._activation = second.torch, experts, activation
        self._biases = [
            ExpertBiases(each.gate_up.to(self._on), each.down.to(self._on)) for each in biases
        ]
        self._rows, self._results = Readback(device), Readback(second)
        self._there, self._back = Uploads(second), Uploads(device)
        self._table = DeviceSlotTable(num_experts, second)
        self._places: Tensor | None = None

    def launch(
        self, layer: int, hidden_states: Tensor, route: Route, slots: dict[int, int]
    ) -> None:
        """Have the second device compute some experts of a route. The host waits for the rows, and
        for nothing else.

        hidden_states  [T, H] on the first device, at most `host_experts.MOST_ROWS` rows
        slots          {expert: slot} on the second device
        """
        (hidden,) = self._rows.read(hidden_states)
        rows, topk_ids = self._there.send(hidden), self._there.send(route.host_ids)
        found = rows.new_empty(*topk_ids.shape, rows.shape[1])
        self._experts.run(
            layer,
            rows,
            Grouping(topk_ids, [*slots], {}, None),
            slots,
            self._table.of(slots),
            self._activation,
            found,
            self._biases[layer] if self._biases else None,
        )
        chosen = torch.isin(route.host_ids, torch.tensor([*slots]))
        self._places = chosen.flatten().nonzero().flatten()
        self._results.begin(found.flatten(0, 1)[self._there.send(self._places)])

    def collect(self, outputs: Tensor) -> None:
        """Write the results of the last `launch` [T, K, H] on the first device, at their places."""
        places = present(self._places, "results of a second device were collected without a launch")
        (values,) = self._results.take()
        outputs.flatten(0, 1).index_copy_(0, self._back.send(places), self._back.send(values))
