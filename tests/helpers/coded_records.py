"""Experts published as codes: records of them, and their words by a reference."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speq.kernels import ops, scaled_ops
from tests.helpers.expert_problems import SILU
from tests.helpers.words import same_words

SEED, TOP_K = 11, 3


@dataclass(frozen=True)
class CodedRecord:
    """A record of codes, and the words of its matrices (gate, up, down), uint16."""

    record: Tensor
    words: tuple[np.ndarray, ...]

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """gate_up_proj and down_proj."""
        gate, up, down = (torch.from_numpy(each.view(np.int16)) for each in self.words)
        return torch.cat([gate, up]).view(torch.bfloat16), down.view(torch.bfloat16)

    def check(self, found: list[Tensor]) -> None:
        gate, up, down = self.words
        assert same_words(found[0].cpu(), np.concatenate([gate, up]))
        assert same_words(found[1].cpu(), down)


def empty(hidden: int, width: int, device: str | torch.device = "cpu") -> list[Tensor]:
    """Room for words of gate_up_proj and down_proj."""
    sizes = (2 * width, hidden), (hidden, width)
    return [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]


def random_ids(rows: int, experts: int, top_k: int = TOP_K, seed: int = SEED) -> Tensor:
    """Distinct experts of each row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()


def check_products(
    device: torch.device,
    format: str,
    of_format: tuple[int | bool, ...],
    records: list[CodedRecord],
    dtype: torch.dtype,
    rows: int,
    gap: int,
) -> None:
    """Products of codes are those of the words in the same slots. gap: bytes behind a record"""
    generator, count = torch.Generator().manual_seed(SEED), len(records)
    order = torch.randperm(count, generator=generator)
    slots = torch.full((count, len(records[0].record) + gap), 0xA5, dtype=torch.uint8)
    gate_up, down = (matrix.expand(count, -1, -1).clone() for matrix in records[0].matrices)
    for record, slot in zip(records, order.tolist(), strict=True):
        slots[slot, : len(record.record)] = record.record
        gate_up[slot], down[slot] = record.matrices
    hidden, width = down.shape[1:]
    hidden_states = torch.randn(rows, hidden, generator=generator).to(dtype)
    head = [each.to(device) for each in (hidden_states, random_ids(rows, count), order)]
    found, wanted = torch.zeros(2, rows, TOP_K, hidden, dtype=dtype, device=device)
    scaled_ops.moe_grouped(format, *head, slots.to(device), width, of_format, SILU, found)
    ops.moe_grouped(*head, gate_up.to(device), down.to(device), SILU, wanted)
    assert torch.equal(found, wanted)
    assert bool(found.isfinite().all()) and bool(found.any(2).all())
