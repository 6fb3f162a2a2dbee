"""Codes of four bits as publishers pack them: names, shapes and order of the tensors of a matrix
[N, K], N outputs and K inputs.

**INT4**, in groups of G inputs, eight codes to an int32. A weight is its code less the group's zero
point, times the group's scale. Records of experts have codes [N, K / 8] of neighbouring inputs,
scales [N, K / G] and zero points [N / 8, K / G] of neighbouring outputs, the first in the lowest
bits. compressed-tensors publishes them so; from others they are turned as they are read:

    gptq  qweight [K / 8, N], scales [K / G, N], qzeros [K / G, N / 8]. The checkpoint format gptq
          has 0x11111111 subtracted from each int32 of qzeros, gptq_v2 has not
    awq   qweight [K, N / 8], scales [K / G, N], qzeros [K / G, N / 8]. An int32 has eight outputs,
          from the lowest bits 0, 2, 4, 6, 1, 3, 5, 7 (`gemm`)

**NVFP4**, in blocks of 16 inputs, two codes to a byte, the first in its low half. A weight is its
e2m1 code times a scale, and that is the block's e4m3 scale times the matrix's (ModelOpt), or
divided by it (compressed-tensors):

    codes [N, K / 2] uint8, scales [N, K / 16] float8_e4m3fn, one float32

**MXFP4** of compressed-tensors, in blocks of 32 inputs, likewise. A weight is its e2m1 code times a
power of 2:

    codes [N, K / 2] uint8, scales [N, K / 32] uint8, exponents with a bias of 127

DeepSeek-V4's experts have the same bytes as int8 and UE8M0, beside matrices in FP8.

Sources: https://github.com/vllm-project/compressed-tensors, https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ,
https://github.com/NVIDIA/Model-Optimizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

INT4, NVFP4, MXFP4 = "int4", "nvfp4", "mxfp4"
CODES_PER_WORD = 8
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
# A 1 in each zero point of an int32.
ONES = 0x11111111
# Place in an int32 of AWQ of each of eight outputs.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Lower and upper halves of the bytes of an int32, and its highest byte.
LOW_HALVES, HIGH_HALVES, TOP = 0x0F0F0F0F, -0x0F0F0F10, -0x01000000


class Int4Groups(NamedTuple):
    """Groups of inputs, neighbours unless a tensor says which input is of which group.

    size    of a group; 0: all inputs are one
    zeros   whether each has a zero point of its own
    halves  whether scales are float16; otherwise they are bfloat16
    """

    size: int
    zeros: bool
    halves: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scales."""
        return torch.float16 if self.halves else torch.bfloat16

    def count(self, columns: int) -> int:
        """Groups of so many inputs."""
        return columns // self.size if self.size else 1


@dataclass(frozen=True, slots=True)
class Turned:
    """A tensor [N, K] stored as [K, N].

    interleaved  whether rows of gate and of up are interleaved there
    before       what to do with the stored bytes first
    """

    rows: int
    columns: int
    dtype: torch.dtype
    interleaved: bool = False
    before: Callable[[Tensor], Tensor] | None = None

    def put(self, stored: Tensor, room: Tensor) -> None:
        """Write the bytes of the tensor into `room`; both [rows * columns * itemsize] uint8.

        `stored` may be overwritten.
        """
        stored = stored if self.before is None else self.before(stored)
        given, made = stored.view(self.dtype), room.view(self.dtype).view(self.rows, self.columns)
        # torch is fast at transposing whole matrices and at copying rows.
        made.copy_(given.view(self.columns, self.rows).t())
        if self.interleaved:
            ordered = given.view(self.rows, self.columns)
            for first, half in enumerate(ordered.chunk(2)):
                half.copy_(made[first::2])
            made.copy_(ordered)

    def of(self, stored: Tensor) -> Tensor:
        """Turn a tensor; [rows, columns]."""
        made = torch.empty(self.rows, self.columns, dtype=self.dtype)
        given = stored.contiguous().flatten().view(torch.uint8).clone()
        self.put(given, made.flatten().view(torch.uint8))
        return made


@dataclass(frozen=True, slots=True)
class InTurns:
    """Rows that are every other row of a matrix of gate and up.

    rows   how many
    first  0: of gate; 1: of up
    """

    rows: int
    first: int

    def put(self, stored: Tensor, room: Tensor) -> None:
        """Write rows [n] uint8 into the matrix `room` [2 n] uint8."""
        room.view(self.rows, 2, -1)[:, self.first] = stored.view(self.rows, -1)


@dataclass(frozen=True, slots=True)
class CodePacking:
    """What a publisher's tensors of a matrix are called, and how they lie.

    format   INT4, NVFP4 or MXFP4
    codes, scales, third  ends of names; third: zero points, or the scale of the matrix
    others   ends of what belongs to a matrix besides
    order    of these, the end of the groups of inputs [K] int32, where inputs are in another order
    turned   whether inputs come first
    by_output  whether a number holds codes of several outputs of an input, as AWQ's
    zeros_less  what an int32 of zero points is stored less
    divides  whether the matrix's scale divides those of blocks
    room     bytes that turning takes, for each byte of codes
    """

    name: str
    format: str
    codes: str
    scales: str
    third: str
    others: tuple[str, ...]
    order: str = ""
    turned: bool = False
    by_output: bool = False
    zeros_less: int = 0
    divides: bool = False
    room: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of codes."""
        if self is DEEPSEEK:
            return torch.int8
        return torch.int32 if self.format == INT4 else torch.uint8

    @property
    def together(self) -> int:
        """Codes in a number of that dtype."""
        return CODES_PER_WORD if self.format == INT4 else 2

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the codes of a matrix."""
        if not self.turned:
            return rows, columns // self.together
        if self.by_output:
            return columns, rows // self.together
        return columns // self.together, rows

    def matrix_shape(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """Shape [N, K] of the matrix of codes of that shape."""
        first, second = codes
        if not self.turned:
            return first, second * self.together
        if self.by_output:
            return second * self.together, first
        return second, first * self.together

    def turns(
        self, rows: int, columns: int, groups: int, dtype: torch.dtype
    ) -> tuple[Turned | None, Turned | None, Turned | None]:
        """How to bring codes, scales of that dtype and the third tensor into a record's order;
        None: they are in it.
        """
        if not self.turned:
            return None, None, None
        words = -(-rows // CODES_PER_WORD)
        codes = Turned(rows, columns // CODES_PER_WORD, torch.int32)
        zeros = Turned(words, groups, torch.int32, before=partial(_add, self.zeros_less))
        if self.by_output:
            codes = Turned(rows, columns // 2, torch.uint8, before=partial(_pair_inputs, words))
            zeros = Turned(words, groups, torch.int32, before=_awq_in_order)
        return codes, Turned(rows, groups, dtype), zeros

    def scales_shape(self, rows: int, groups: int) -> tuple[int, int]:
        return (groups, rows) if self.turned else (rows, groups)

    def zeros_shape(self, rows: int, groups: int) -> tuple[int, int]:
        return self.scales_shape(-(-rows // CODES_PER_WORD), groups)

    def unpack(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Bring a matrix's tensors in INT4 into a record's order: codes [N, K / 2] uint8, scales
        [N, K / G] and zero points [N / 8, K / G] int32.
        """
        rows, columns = self.matrix_shape(tuple(codes.shape))
        turns = self.turns(rows, columns, scales.numel() // rows, scales.dtype)
        of_codes, of_scales, of_zeros = turns
        return (
            (codes if of_codes is None else of_codes.of(codes)).view(torch.uint8),
            scales if of_scales is None else of_scales.of(scales),
            zeros if of_zeros is None or zeros is None else of_zeros.of(zeros),
        )


def _add(number: int, stored: Tensor) -> Tensor:
    """Add to each int32, as whole words: a zero point of 0 borrowed from its neighbour."""
    stored.view(torch.int32).add_(number)
    return stored


def _awq_in_order(stored: Tensor) -> Tensor:
    """Order the codes of each int32 from AWQ's order."""
    words = stored.view(torch.int32)
    made = torch.zeros_like(words)
    for at, place in enumerate(AWQ_PLACES):
        made |= (words >> 4 * place & 0xF) << 4 * at
    return made.view(torch.uint8)


def _pair_inputs(words: int, stored: Tensor) -> Tensor:
    """Bring AWQ's codes [K, N / 8] int32 to bytes [K / 2, N] of two inputs of an output each.

    words  N / 8
    """
    even, odd = stored.view(torch.int32).view(-1, 2, words).unbind(1)
    # Bytes of outputs 0, 4, 1, 5 and 2, 6, 3, 7.
    first = (even & LOW_HALVES) | ((odd & LOW_HALVES) << 4)
    second = (even >> 4 & LOW_HALVES) | (odd & HIGH_HALVES)
    made = torch.empty(*first.shape, 2, dtype=torch.int32)
    front, back = made.unbind(2)
    front.copy_(first & 0xFF)
    front |= first >> 8 & 0xFF00
    front |= (second & 0xFF) << 16
    front |= second << 8 & TOP
    back.copy_(first >> 8 & 0xFF)
    back |= first >> 16 & 0xFF00
    back |= second << 8 & 0xFF0000
    back |= second & TOP
    return made.flatten().view(torch.uint8)


COMPRESSED_TENSORS = "compressed-tensors"
COMPRESSED = CodePacking(
    *(COMPRESSED_TENSORS, INT4, ".weight_packed", ".weight_scale", ".weight_zero_point"),
    others=(".weight_shape", ".weight_g_idx"),
    order=".weight_g_idx",
)
OF_GPTQ = INT4, ".qweight", ".scales", ".qzeros", (".g_idx",), ".g_idx"
GPTQ_V2 = CodePacking("gptq_v2", *OF_GPTQ, turned=True, room=1)
GPTQ = CodePacking("gptq", *OF_GPTQ, turned=True, zeros_less=ONES, room=1)
AWQ = CodePacking("awq", *OF_GPTQ[:4], others=(), turned=True, by_output=True, room=5)
MODELOPT = CodePacking(
    *("modelopt", NVFP4, ".weight", ".weight_scale", ".weight_scale_2"),
    others=(".input_scale", ".pre_quant_scale"),
)
COMPRESSED_NVFP4 = CodePacking(
    *(COMPRESSED_TENSORS, NVFP4, ".weight_packed", ".weight_scale", ".weight_global_scale"),
    others=(".input_global_scale",),
    divides=True,
)
COMPRESSED_MXFP4 = CodePacking(
    *(COMPRESSED_TENSORS, MXFP4, ".weight_packed", ".weight_scale", ".weight_zero_point"),
    others=(".input_global_scale",),
    room=1,
)
DEEPSEEK = CodePacking(
    *("deepseek", MXFP4, ".weight", ".scale", ".weight_zero_point"), others=(), room=1
)
PACKINGS = (COMPRESSED, GPTQ_V2, GPTQ, AWQ, MODELOPT, COMPRESSED_NVFP4, COMPRESSED_MXFP4, DEEPSEEK)
# Those that have layers in FP8 beside others.
BESIDE_FP8 = (MODELOPT, DEEPSEEK)
