"""Codecs of experts published as codes with scales, which stay in their published form.

fp8    e4m3 codes in blocks of 128 rows and columns, or of a row, or all of a matrix, each with a
       float32 scale: 8 bits a weight
mxfp4  e2m1 codes in blocks of 32 neighbours, each with a power of 2: 4.25 bits a weight
int4   4-bit codes in groups of neighbours, each with a 16-bit scale and perhaps a zero point: 4.5
       bits a weight in groups of 32, 4.13 of 128
nvfp4  e2m1 codes in blocks of 16 neighbours, each with an e4m3 scale, and a float32 scale for each
       matrix: 4.5 bits a weight
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from speq.errors import OptionError, present
from speq.experts.codec import ExpertShape, Matrices, plain_in
from speq.experts.int4 import Int4Arena, Int4Expert
from speq.experts.slots import SlotExperts
from speq.files.alignment import align
from speq.files.fp8_settings import Fp8Blocks
from speq.files.packing import Int4Groups
from speq.kernels import scaled_ops
from speq.kernels.compact_ops import WHOLE, Part
from speq.kernels.ops import matrices_of
from speq.kernels.scaled_layout import ScaledLayout
from speq.kernels.scaled_words import fp8_codes, int4_codes, mxfp4_codes, nvfp4_codes, tensor_of


@dataclass(frozen=True, slots=True)
class ScaledCodec:
    """Codec with packed experts of one size, which decode to bfloat16."""

    name: ClassVar[str]
    op: ClassVar[str]
    takes: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    usual_bits: ClassVar[float | None] = None
    shape: ExpertShape

    @classmethod
    def codes(cls, shape: ExpertShape) -> bool:
        """True if experts were published in this format. Others cannot be: most weights are not a
        code times a scale.
        """
        return shape.published == cls.name

    @property
    def layout(self) -> ScaledLayout:
        """Layout of experts. Raises ValueError for sizes that kernels do not know."""
        shape = self.shape
        sizes = shape.hidden_size, shape.expert_width
        return scaled_ops.LAYOUTS[self.name](*sizes, *self.numbers, gated=shape.gated)

    @property
    def numbers(self) -> scaled_ops.Numbers:
        """Arguments of the op that other formats lack."""
        return ()

    def quantize(self, exact: Matrices) -> Iterator[tuple[Tensor, ...]]:
        """Nearest codes and scales of each matrix, and what else its sections are."""
        raise NotImplementedError

    def run(self, *arguments: Any) -> None:
        """Run the op, as `SlotExperts` calls it."""
        scaled_ops.moe_grouped(self.name, *arguments)

    @property
    def plain_bytes(self) -> int:
        return self.shape.nbytes

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes

    @property
    def record_range(self) -> tuple[int, int]:
        return self.record_bytes, self.record_bytes

    @property
    def slot_bytes(self) -> int:
        return align(self.record_bytes)

    def with_slot_bytes(self, largest_bytes: int) -> Self:
        return self

    def encode(
        self, exact: Matrices, base: Int4Expert | None, slot: Tensor, part: Part = WHOLE
    ) -> int:
        """Encode weights that are codes times powers of 2. Raises SpeqError for others."""
        if part.end < WHOLE.end:
            return 0
        layout = self.layout
        for parts, sections in zip(self.quantize(exact), layout.parts, strict=True):
            for values, section in zip(parts, sections, strict=True):
                tensor_of(slot, section).copy_(values.view(section.dtype).view(section.shape))
        found = self.decode(slot)
        same = (
            torch.equal(ours.view(torch.int16), words.view(torch.int16))
            for ours, words in zip(found, exact, strict=True)
        )
        if not all(same):
            raise OptionError(
                f"codec {self.name} codes {self.takes}, and these weights are not codes times a "
                "scale; use codec raw"
            )
        return layout.nbytes

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        matrices = self.shape.empty()
        self._decode(slot, *matrices)
        return matrices

    def _decode(self, slot: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        scaled_ops.decode(self.name, slot, self.numbers, gate_up_proj, down_proj)

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        held = slots, self.shape.expert_width, self.numbers
        plain = plain_in(slots, self.shape, self._decode)
        return SlotExperts(self.run, lambda layer: held, plain)


@dataclass(frozen=True, slots=True)
class Fp8Codec(ScaledCodec):
    name: ClassVar[str] = "fp8"
    op: ClassVar[str] = "moe_grouped_fp8"
    takes: ClassVar[str] = "what was published in fp8"

    @property
    def numbers(self) -> Fp8Blocks:
        return self.shape.blocks

    def quantize(self, exact: Matrices) -> Iterator[tuple[Tensor, ...]]:
        return (fp8_codes(each, *self.numbers) for each in matrices_of(*exact))


@dataclass(frozen=True, slots=True)
class Mxfp4Codec(ScaledCodec):
    """MXFP4 codec. Rows of gate and up are interleaved, as in gpt_oss."""

    name: ClassVar[str] = "mxfp4"
    op: ClassVar[str] = "moe_grouped_mxfp4"
    takes: ClassVar[str] = "what was published in mxfp4"

    def quantize(self, exact: Matrices) -> Iterator[tuple[Tensor, ...]]:
        in_turns = torch.stack(exact[0].chunk(2), dim=1).flatten(0, 1)
        return map(mxfp4_codes, (in_turns, exact[1]))


@dataclass(frozen=True, slots=True)
class Int4Codec(ScaledCodec):
    """INT4 codec: records are tensors as compressed-tensors packs them, and GPTQ's and AWQ's in
    their order.
    """

    name: ClassVar[str] = "int4"
    op: ClassVar[str] = "moe_grouped_int4"
    takes: ClassVar[str] = "what was published in int4"

    @property
    def numbers(self) -> Int4Groups:
        return present(self.shape.groups, "experts in INT4 have no groups")

    def quantize(self, exact: Matrices) -> Iterator[tuple[Tensor, ...]]:
        zeros = tuple(torch.full((each.nbytes,), 0x88).byte() for each in self.layout.others)
        for at, matrix in enumerate(matrices_of(*exact)):
            codes, scales = int4_codes(matrix, self.numbers.size)
            yield codes, scales.to(self.numbers.dtype), *zeros[at : at + 1]


@dataclass(frozen=True, slots=True)
class Nvfp4Codec(ScaledCodec):
    name: ClassVar[str] = "nvfp4"
    op: ClassVar[str] = "moe_grouped_nvfp4"
    takes: ClassVar[str] = "what was published in nvfp4"

    @property
    def numbers(self) -> tuple[bool]:
        return (self.shape.divides,)

    def quantize(self, exact: Matrices) -> Iterator[tuple[Tensor, ...]]:
        for matrix in matrices_of(*exact):
            codes, scales, of_matrix = nvfp4_codes(matrix)
            yield codes, scales, of_matrix.reciprocal() if self.shape.divides else of_matrix
