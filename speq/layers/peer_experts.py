"""Experts that a further device holds and computes, beside the device that runs the rest.

torch copies rows there and results back: from card to card where the driver can, and through the
host otherwise. The host waits for neither. Both devices have the same kernels, so results are those
of the first bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.devices.staged import Uploads
from speq.errors import present
from speq.experts.slots import SlotExperts
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.slot_table import DeviceSlotTable
from speq.routing import Route


class PeerExperts:
    """Runs the experts of a further device for rows of the first.

    device, peer  where rows come from, and where the experts are
    experts       in the slots of the further device
    biases        biases of each layer's experts; empty if they have none
    """

    def __init__(
        self,
        device: Accelerator,
        peer: Accelerator,
        experts: SlotExperts,
        num_experts: int,
        activations: Sequence[Activation],
        biases: Sequence[ExpertBiases],
    ) -> None:
        self._on, self._experts, self._activations = peer.torch, experts, activations
        self._biases = [
            ExpertBiases(each.gate_up.to(self._on), each.down.to(self._on)) for each in biases
        ]
        self._there, self._back = Uploads(peer), Uploads(device)
        self._table = DeviceSlotTable(num_experts, peer)
        self._found: tuple[Tensor, Tensor] | None = None

    def launch(
        self, layer: int, hidden_states: Tensor, route: Route, slots: dict[int, int]
    ) -> None:
        """Have the device compute some experts of a route. The host waits for nothing.

        hidden_states  [T, H] on the first device
        slots          {expert: slot} on this one
        """
        rows, host_ids = hidden_states.to(self._on), route.host_ids
        others = frozenset(host_ids.flatten().tolist()) - slots.keys()
        # Of all rows, as on the first: their number says how they are multiplied.
        grouping = Grouping.of(self._there.send(host_ids), host_ids, left_out=others)
        found = rows.new_empty(*host_ids.shape, rows.shape[1])
        self._experts.run(
            layer,
            rows,
            grouping,
            slots,
            self._table.of(slots),
            self._activations[layer],
            found,
            self._biases[layer] if self._biases else None,
        )
        chosen = torch.isin(host_ids, torch.tensor([*slots]))
        places = chosen.flatten().nonzero().flatten()
        self._found = places, found.flatten(0, 1)[self._there.send(places)]

    def collect(self, outputs: Tensor) -> None:
        """Write the results of the last `launch` [T, K, H] on the first device, at their places."""
        places, results = present(self._found, "results of a device were collected with no launch")
        self._found = None
        outputs.flatten(0, 1).index_copy_(0, self._back.send(places), results.to(outputs.device))
