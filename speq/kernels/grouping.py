"""Where the rows of each expert are: a layer's routes, grouped on the host.

With them the rows of an expert are found without asking the device, which would have to finish all
it was given before it could answer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speq.errors import present
from speq.kernels import library
from speq.kernels.library import Kernels

# A kernel that takes few rows is called for so many blocks of them at most, and then reads an
# expert as often. More rows go through experts one at a time. Raw experts are then read once.
# Compact ones are read, written as plain words and read again: as much as four times their record.
# That way also launches some seven kernels for an expert, not two for a block. No codec has a limit
# of its own, or the codec would choose the order of sums, and so the output.
MAX_BLOCKS = 4


def most_fused_rows(kernels: Kernels, top_k: int) -> int:
    """Rows of a layer that kernels run in blocks; more of them go through experts one at a time."""
    return MAX_BLOCKS * kernels.call_rows(top_k)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The routes of T rows to K experts each, in one layer.

    topk_ids  [T, K] int64 on the device
    experts   those of the routes that are asked for, in ascending order
    spans     of each expert, where its columns of `index` begin and end
    index     [2, T * K] int64 on the device: rows, and places of the flattened routes. The columns
              of an expert are side by side, in the order of the rows. None where rows are so few
              that the kernels find them.
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
        """host_ids  [T, K] int64: a copy of topk_ids in host memory
        live      rows that are not given up; None: all
        left_out  experts that no row has
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
            # A copy from other memory would wait for all that the device was given before.
            index = index.pin_memory()
        return cls(
            topk_ids,
            experts.tolist(),
            dict(zip(experts.tolist(), spans, strict=True)),
            index.to(topk_ids.device, non_blocking=True),
        )

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Rows [R] and places [R] of one of `experts`, on the device."""
        index = present(self.index, "rows of an expert are asked for that were not grouped")
        start, end = self.spans[expert]
        rows, places = index[:, start:end]
        return rows, places
