"""Experts that the host computes for a device, out of the records that copies are made from.

Results are those of the device bit for bit: the kernels of both add up in one order
(csrc/sum_order.h), and round alike.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.devices.staged import Readback, Uploads
from speq.experts.codec import ExpertCodec
from speq.kernels import library
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.slot_table import HostSlotTable
from speq.routing import Route

# Bytes of a cache line.
LINE = 64


class RecordLender(Protocol):
    """The part of `StreamTransfer` that this class uses."""

    def lend_records(
        self, layer: int, experts: Sequence[int]
    ) -> AbstractContextManager[dict[int, Tensor]]: ...


class HostTimes(NamedTuple):
    """When a call began and ended, and the seconds of its kernels."""

    start_s: float
    compute_s: float
    end_s: float

    @property
    def round_trip_s(self) -> float:
        return self.end_s - self.start_s - self.compute_s


class HostExperts:
    """Runs experts on the host.

    device   that rows come from and results go to
    codec    of the records, which need no draft
    lender   keeps records in host memory while they are read
    biases   biases of each layer's experts; empty if they have none
    clock    gives seconds
    """

    def __init__(
        self,
        device: Accelerator,
        codec: ExpertCodec,
        lender: RecordLender,
        num_experts: int,
        activations: Sequence[Activation],
        biases: Sequence[ExpertBiases],
        clock: Callable[[], float],
    ) -> None:
        self._codec, self._lender, self._activations = codec, lender, activations
        self._biases = [ExpertBiases(each.gate_up.cpu(), each.down.cpu()) for each in biases]
        self._readback, self._uploads = Readback(device), Uploads(device)
        self._table = HostSlotTable(num_experts)
        self._clock = clock

    def begin(self, hidden_states: Tensor) -> None:
        """Have a layer's rows come to the host: [T, H] on the device. Work that is queued behind
        this does not delay them.
        """
        self._readback.begin(hidden_states)

    def run(self, layer: int, route: Route, experts: Sequence[int], outputs: Tensor) -> HostTimes:
        """Write the outputs of some experts of a route for the rows of `begin`: [T, K, H] on the
        device, at their places.
        """
        start_s = self._clock()
        (hidden,) = self._readback.take()
        began_s = self._clock()
        found = torch.empty(outputs.shape, dtype=outputs.dtype)
        biases = self._biases[layer] if self._biases else None
        with self._lender.lend_records(layer, experts) as records, library.ordered_sums():
            for expert, record in records.items():
                held = self._codec.experts(_slot_of(record), None)
                slots = {expert: 0}
                grouping = Grouping(route.host_ids, [expert], {}, None)
                table = self._table.of(slots)
                act = self._activations[layer]
                held.run(layer, hidden, grouping, slots, table, act, found, biases)
        compute_s = self._clock() - began_s
        chosen = torch.isin(route.host_ids, torch.tensor([*experts]))
        places = chosen.flatten().nonzero().flatten()
        values = self._uploads.send(found.flatten(0, 1)[places])
        outputs.flatten(0, 1).index_copy_(0, self._uploads.send(places), values)
        return HostTimes(start_s, compute_s, self._clock())


def _slot_of(record: Tensor) -> Tensor:
    """View a record as the only one of an arena [1, n], in which slots begin at whole lines."""
    return record.as_strided((1, len(record)), (-(-len(record) // LINE) * LINE, 1))
