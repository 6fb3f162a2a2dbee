"""Size of exact experts as residuals over a draft's codes: counted, not written.

A residual record has a byte per weight, three bits per code 0 and an escape for each word that
these do not determine; csrc/compact.h has its layout. The count omits the padding of sections,
which is below a kilobyte.

Shape letters: N outputs, K inputs.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from speq.kernels.compact_layout import BLOCK_COLUMNS, INDEX_BYTES, QUAD_ROWS
from speq.kernels.windows import escapes, words_of
from speq.quantizing.expert import FloatExpert, QuantisedExpert
from speq.quantizing.gptq import ZERO_POINT, QuantisedMatrix


@dataclass(frozen=True, slots=True)
class ResidualCount:
    """Size of exact BF16 weights as residuals over a draft's codes.

    zeros         weights with code 0; zero_escapes: those whose class does not determine the word's
                  high byte
    exceptions    weights with another code whose window does not contain the word
    record_bytes  bytes in all, without the padding of sections
    """

    weights: int = 0
    zeros: int = 0
    zero_escapes: int = 0
    exceptions: int = 0
    record_bytes: int = 0

    def __add__(self, other: "ResidualCount") -> "ResidualCount":
        return ResidualCount(
            self.weights + other.weights,
            self.zeros + other.zeros,
            self.zero_escapes + other.zero_escapes,
            self.exceptions + other.exceptions,
            self.record_bytes + other.record_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bits_per_weight": self.bits_per_weight}

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.record_bytes / self.weights


def residual_of(exact: FloatExpert, draft: QuantisedExpert) -> ResidualCount:
    """Count the residual of an exact expert of BF16 words over a draft of it.

    Its matrices are in the draft's order: inputs of a group are neighbours, and rows of gate and up
    are in the order of the inputs of down.
    """
    width = exact.down_proj.shape[1]
    inner = draft.down.groups.argsort(stable=True)
    outputs = torch.arange(len(exact.down_proj))
    counts = [_count(exact.down_proj, draft.down, outputs)] + [
        _count(exact.gate_up_proj, draft.gate_up, inner + first)
        for first in range(0, len(exact.gate_up_proj), width)
    ]
    end = ResidualCount(record_bytes=INDEX_BYTES)
    return sum(counts, start=end)


def _count(exact: Tensor, draft: QuantisedMatrix, rows: Tensor) -> ResidualCount:
    """Count some rows, [R] int64 in order, of a matrix [N, K]."""
    order = draft.groups.argsort(stable=True)
    blocks = order.split(BLOCK_COLUMNS)
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    zero_escapes, exceptions = zeros.clone(), zeros.clone()
    class_bytes = 0
    for block in blocks:
        words = words_of(exact[rows[:, None], block])
        codes = draft.codes[block[:, None], rows].t().to(torch.int32) - ZERO_POINT
        scales = draft.scales[draft.groups[block].long()[:, None], rows].t()
        is_zero, untold = codes == 0, escapes(words, codes, scales)
        zeros_of_row = is_zero.sum(1)
        zeros += zeros_of_row
        class_bytes += int(((3 * zeros_of_row + 7) // 8).sum())
        zero_escapes += (untold & is_zero).sum(1)
        exceptions += (untold & ~is_zero).sum(1)
    flagged = pad(exceptions, (0, -len(rows) % QUAD_ROWS)).view(-1, QUAD_ROWS).any(1)
    flagged_rows = int(flagged.repeat_interleave(QUAD_ROWS)[: len(rows)].sum())
    escaped, excepted = int(zero_escapes.sum()), int(exceptions.sum())
    weights = len(rows) * len(order)
    record_bytes = (
        weights
        + class_bytes
        + escaped
        + 2 * excepted
        + flagged_rows * len(blocks)
        + INDEX_BYTES * len(flagged)
    )
    return ResidualCount(weights, int(zeros.sum()), escaped, excepted, record_bytes)
