"""Backend of one layer whose experts all stay resident."""

from typing import ClassVar

import torch
from torch import Tensor

from speq.experts.codec import ExpertCodec
from speq.kernels import decoder_ops, library
from speq.kernels.grouping import Grouping, most_fused_rows
from speq.kernels.ops import Activation
from speq.routing import Route


class ResidentExperts:
    """Backend that runs a layer's experts out of an arena in which each has the slot of its number.

    slots  [E, slot_bytes] uint8, experts packed by `codec`, which needs no draft
    """

    drafts: ClassVar[bool] = False

    def __init__(self, slots: Tensor, codec: ExpertCodec, activation: Activation) -> None:
        self._experts, self._activation = codec.experts(slots, None), activation
        self._table = torch.arange(len(slots), device=slots.device)
        self._slots = {expert: expert for expert in range(len(slots))}

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        ids = route.topk_ids
        rows, top_k = ids.shape
        # Kernels of few rows find their experts themselves; the host does not wait for the device.
        grouping = Grouping(ids, [], {}, None)
        if rows > most_fused_rows(library.kernels_for(ids), top_k):
            grouping = Grouping.of(ids, ids.cpu())
        out = hidden_states.new_empty(rows, top_k, hidden_states.shape[1])
        run, table = self._experts.run, self._table
        run(layer, hidden_states, grouping, self._slots, table, self._activation, out)
        return decoder_ops.combine(out, route.topk_weights, hidden_states.dtype)
