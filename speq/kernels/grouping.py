"""Grouping of a layer's routes by expert, on the host.

With it the rows of an expert are found without reading the device, which would wait for all queued
work.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speq.errors import present
from speq.kernels import library
from speq.kernels.library import Kernels

# A kernel for few rows is called for at most so many blocks, and reads an expert once per block.
# More rows go through experts one at a time. Raw experts are then read once. Compact ones are read,
# decoded to plain weights and read again: as much as four times their record. That way also
# launches some seven kernels per expert, not two per block. The limit does not depend on the codec,
# or the codec would change the order of sums, and so the output.
MAX_BLOCKS = 4


def most_fused_rows(kernels: Kernels, top_k: int) -> int:
    """Most rows of a layer that kernels run in blocks; more go through experts one at a time."""
    return MAX_BLOCKS * kernels.call_rows(top_k)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The routes of T rows to K experts each, in one layer.

    topk_ids  [T, K] int64 on the device
    experts   experts of the routes to run, ascending
    spans     first and last column of `index` of each expert
    index     [2, T * K] int64 on the device: rows, and places of the flattened routes. The columns
              of an expert are contiguous, in row order. None if rows are so few that the kernels
              find them.
    """

    topk_ids: Tensor
    experts: list[int]
    spans: dict[int, tuple[int, int]]
    index: Tensor | None

    @classmethod
    def of(
        cls,
        topk_ids: Tensor,
        host_ids: Tensor,
        active_rows: tuple[int, ...] | None = None,
        left_out: frozenset[int] = frozenset(),
    ) -> "Grouping":
        """Group routes by expert.

        host_ids     [T, K] int64: a copy of topk_ids in host memory
        active_rows  rows that are not pruned; None: all
        left_out     experts to leave out
        """
        rows, top_k = topk_ids.shape
        if rows <= most_fused_rows(library.kernels_for(topk_ids), top_k):
            asked = host_ids if active_rows is None else host_ids[[*active_rows]]
            return cls(topk_ids, sorted(set(asked.flatten().tolist()) - left_out), {}, None)
        ids = host_ids.numpy().reshape(-1)
        places = ids.argsort(kind="stable")
        if active_rows is not None:
            places = places[np.isin(places // top_k, active_rows)]
        if left_out:
            places = places[~np.isin(ids[places], [*left_out])]
        experts, starts = np.unique(ids[places], return_index=True)
        ends = [*starts[1:].tolist(), len(places)]
        spans = zip(starts.tolist(), ends, strict=True)
        index = torch.from_numpy(np.stack([places // top_k, places]))
        if topk_ids.is_cuda:
            # A copy from unpinned memory would wait for all queued work of the device.
            index = index.pin_memory()
        return cls(
            topk_ids,
            experts.tolist(),
            dict(zip(experts.tolist(), spans, strict=True)),
            index.to(topk_ids.device, non_blocking=True),
        )

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Rows [R] and places [R] of one of `experts`, on the device."""
        index = present(self.index, "rows of an expert were requested without an index")
        start, end = self.spans[expert]
        rows, places = index[:, start:end]
        return rows, places
