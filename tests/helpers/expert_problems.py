"""Problems of random sizes for kernels of exact experts, of as many experts as published models
have.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.kernels import compact_ops, library, reference
from speq.kernels.ops import Activation
from speq.kernels.scaled_layout import (
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)
from speq.kernels.scaled_words import fp8_codes, mxfp4_codes, part_of
from tests.reference.experts import gate_up_rows

SIZES = [(64, 32), (96, 48), (160, 72), (70, 38), (288, 33), (33, 34), (256, 100)]
SIZES_OF_CODES = [(64, 64), (128, 192), (320, 64), (192, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Positions that one call of a kernel takes.
MOST_POSITIONS = 256
BLOCK = 128
SILU = Activation("silu")


@dataclass
class Problem:
    """Rows and their routes, and the words of the experts that are in slots."""

    hidden: Tensor
    ids: Tensor
    table: Tensor
    gate_up: Tensor
    down: Tensor
    activation: Activation
    biases: tuple[Tensor, ...]

    @classmethod
    def of(cls, rng: random.Random, sizes: list[tuple[int, int]] = SIZES) -> "Problem":
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        top_k, experts = rng.choice([1, 2, 8, 10, 16, 17, 22]), rng.choice([64, 256, 384, 512])
        rows = rng.randint(1, min(16, MOST_POSITIONS // top_k))
        hidden_size, width = rng.choice(sizes)
        dtype = rng.choice(DTYPES)
        # Half of the time few experts, so that rows share them.
        among = torch.randperm(experts, generator=generator)
        among = among[: max(top_k, 24)] if rng.random() < 0.5 else among
        orders = [torch.randperm(len(among), generator=generator)[:top_k] for _ in range(rows)]
        ids = torch.stack([among[order] for order in orders])
        used = ids.unique()
        table = torch.full((experts,), -1)
        table[used] = torch.randperm(len(used), generator=generator)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.1

        name = rng.choice(sorted(library.ACTIVATION_CODES))
        limit = rng.choice((math.inf, 0.5))
        activation = Activation(name, limit if Activation(name).gated else math.inf)
        of_up = gate_up_rows(name, width)
        biases: tuple[Tensor, ...] = ()
        if rng.random() < 0.3:
            biases = (
                normal(experts, of_up).to(dtype),
                normal(experts, hidden_size).to(dtype),
            )
        return cls(
            (10 * normal(rows, hidden_size)).to(dtype),
            ids,
            table,
            normal(len(used), of_up, hidden_size).bfloat16(),
            normal(len(used), hidden_size, width).bfloat16(),
            activation,
            biases,
        )

    def run(self, op: Any, weights: tuple[Any, ...], activation: Any, rows: slice) -> Tensor:
        hidden, ids = self.hidden[rows].contiguous(), self.ids[rows].contiguous()
        out = hidden.new_full((*ids.shape, hidden.shape[1]), torch.nan)
        op(hidden, ids, self.table, *weights, *activation, out, *self.biases)
        return out

    def on(self, device: str) -> "Problem":
        """The same problem on a device."""
        tensors = (self.hidden, self.ids, self.table, self.gate_up, self.down)
        biases = tuple(each.to(device) for each in self.biases)
        return Problem(*(each.to(device) for each in tensors), self.activation, biases)

    def forms(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Name an op for the experts in each form, and give what it takes of them."""
        yield "moe_grouped_out", (self.gate_up, self.down)
        alike = self.gate_up.to(self.hidden.dtype), self.down.to(self.hidden.dtype)
        yield "moe_grouped_out", alike
        yield "moe_grouped_lossless_out", self.lossless()
        width = self.down.shape[2]
        gated = self.gate_up.shape[1] != width
        if not self.hidden.shape[1] % 2 and not width % 2:
            yield "moe_grouped_residual_out", self.residual()
        if not self.hidden.shape[1] % 64 and not width % 64:
            layout = Fp8Layout(self.hidden.shape[1], width, BLOCK, BLOCK, gated=gated)
            fp8 = self._records(layout, lambda matrix: fp8_codes(matrix, BLOCK, BLOCK))
            yield "moe_grouped_fp8_out", (fp8, width, BLOCK, BLOCK)
            if gated:
                mxfp4 = self._records(Mxfp4Layout(self.hidden.shape[1], width), mxfp4_codes)
                yield "moe_grouped_mxfp4_out", (mxfp4, width)
        if not self.hidden.shape[1] % 32 and not width % 32:
            of = self.hidden.shape[1], width
            for kind in ((32, False, False), (32, True, True)):
                slots = self._drawn(Int4GroupsLayout(*of, *kind, gated=gated), 16)
                yield "moe_grouped_int4_out", (slots, width, *kind)
            slots = self._drawn(Nvfp4Layout(*of, gated=gated), 8)
            yield "moe_grouped_nvfp4_out", (slots, width, False)

    def lossless(self) -> tuple[Tensor, int]:
        experts = zip(self.gate_up, self.down, strict=True)
        slots = slots_of([compact_ops.encode(*expert) for expert in experts])
        return slots, self.down.shape[2]

    def residual(self) -> tuple[Any, ...]:
        experts = list(zip(self.gate_up, self.down, strict=True))
        pairs = [
            tuple(reference.quantize_int4(matrix, matrix.shape[1]) for matrix in expert)
            for expert in experts
        ]
        records = [
            compact_ops.encode(*expert, *pair) for expert, pair in zip(experts, pairs, strict=True)
        ]
        codes = [
            torch.stack([pair[of][part] for pair in pairs]) for of in (0, 1) for part in (0, 1)
        ]
        return slots_of(records), self.table, *codes, None

    def _drawn(self, layout: ScaledLayout, scale_bits: int) -> Tensor:
        """Records of any codes, under scales of usual sizes: 16 bits, or e4m3 and a float32."""
        rng = random.Random(int(self.ids.sum()))
        records = []
        for _ in self.gate_up:
            record = torch.frombuffer(bytearray(rng.randbytes(layout.nbytes)), dtype=torch.uint8)
            for sections in layout.parts:
                scales = part_of(record, sections[1])
                if scale_bits == 16:  # from 2^-15 to 1 / 32 in either format
                    scales[1::2] = scales[1::2] % 8 + 0x20
                else:
                    scales.copy_(scales % 64 + 32)
                    one = torch.tensor([rng.uniform(1e-4, 1e-2)])
                    part_of(record, sections[2]).copy_(one.view(torch.uint8))
            records.append(record)
        return slots_of(records)

    def _records(self, layout: ScaledLayout, codes_of: Any) -> Tensor:
        width = self.down.shape[2]
        records = []
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            in_turns = isinstance(layout, Mxfp4Layout)
            of = [gate_up, down] if in_turns else [*gate_up.split(width), down]
            record = torch.zeros(layout.nbytes, dtype=torch.uint8)
            for matrix, sections in zip(of, layout.parts, strict=True):
                for section, part in zip(sections, codes_of(matrix), strict=True):
                    part_of(record, section).copy_(part.contiguous().view(torch.uint8).flatten())
            records.append(record)
        return slots_of(records)


def slots_of(records: list[Tensor]) -> Tensor:
    size = -(-max(map(len, records)) // 64) * 64
    slots = torch.zeros(len(records), size, dtype=torch.uint8)
    for slot, record in zip(slots, records, strict=True):
        slot[: len(record)] = record
    return slots
