"""Codecs of experts that were published as codes with scales. Their records are what is published.

fp8    e4m3 codes in blocks of 128 rows and columns, each with a float32 scale: 8 bits a weight
mxfp4  e2m1 codes in blocks of 32 neighbours, each with a power of 2: 4.25 bits a weight
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.experts.codec import ExpertShape, Matrices
from speq.experts.int4 import Int4Arena, Int4Expert
from speq.experts.slots import PlainWords, SlotExperts
from speq.files.alignment import aligned
from speq.kernels import scaled_ops
from speq.kernels.ops import PlainExpert
from speq.kernels.scaled_layout import Fp8Layout, Mxfp4Layout, ScaledLayout
from speq.kernels.scaled_words import fp8_codes, fp8_words, mxfp4_codes, mxfp4_words, part_of


@dataclass(frozen=True, slots=True)
class ScaledCodec:
    """Records of one size, which decode to words of bfloat16."""

    name: ClassVar[str]
    op: ClassVar[str]
    takes: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    usual_bits: ClassVar[float | None] = None
    shape: ExpertShape

    @classmethod
    def codes(cls, shape: ExpertShape) -> bool:
        """Whether experts were published so. No others are turned into such records: most words
        are no code times a scale.
        """
        return shape.published == cls.name

    @property
    def layout(self) -> ScaledLayout:
        raise NotImplementedError

    def words(self, record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """Write the words of a record."""
        raise NotImplementedError

    def run(self, *arguments: Any) -> None:
        """The op, as `SlotExperts` calls it."""
        raise NotImplementedError

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
        return aligned(self.record_bytes)

    def holding(self, largest_bytes: int) -> Self:
        return self

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        matrices = self.shape.empty()
        self.words(slot, *matrices)
        return matrices

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        held = slots, self.shape.expert_width

        def plain(layer: int) -> PlainWords:
            matrices = self.shape.empty(slots.device)

            def read(expert: int, slot: int) -> PlainExpert:
                self.words(slots[slot], *matrices)
                return PlainExpert(*matrices)

            return read

        return SlotExperts(self.run, lambda layer: held, plain)


@dataclass(frozen=True, slots=True)
class Fp8Codec(ScaledCodec):
    name: ClassVar[str] = "fp8"
    op: ClassVar[str] = "moe_grouped_fp8"
    takes: ClassVar[str] = "what was published in fp8"

    @property
    def layout(self) -> Fp8Layout:
        return Fp8Layout(self.shape.hidden_size, self.shape.expert_width)

    def encode(self, exact: Matrices, base: Int4Expert | None, slot: Tensor) -> int:
        """Of words that are codes times powers of 2. Raises SpeqError for others."""
        layout = self.layout
        matrices = *exact[0].chunk(2), exact[1]
        for words, of_codes, of_scales in zip(matrices, layout.codes, layout.scales, strict=True):
            codes, scales = fp8_codes(words)
            check_same(fp8_words(codes, scales), words, self.name)
            part_of(slot, of_codes).view(codes.shape).copy_(codes)
            part_of(slot, of_scales).view(torch.float32).view(scales.shape).copy_(scales)
        return layout.nbytes

    def words(self, record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        scaled_ops.decode_fp8(record, gate_up_proj, down_proj)

    def run(self, *arguments: Any) -> None:
        scaled_ops.moe_grouped_fp8(*arguments)


@dataclass(frozen=True, slots=True)
class Mxfp4Codec(ScaledCodec):
    """Rows of gate and up take turns, as gpt_oss has them."""

    name: ClassVar[str] = "mxfp4"
    op: ClassVar[str] = "moe_grouped_mxfp4"
    takes: ClassVar[str] = "what was published in mxfp4"

    @property
    def layout(self) -> Mxfp4Layout:
        return scaled_ops.mxfp4_layout(self.shape.hidden_size, self.shape.expert_width)

    def encode(self, exact: Matrices, base: Int4Expert | None, slot: Tensor) -> int:
        """Of words that are codes times powers of 2. Raises SpeqError for others."""
        layout = self.layout
        matrices = torch.stack(exact[0].chunk(2), dim=1).flatten(0, 1), exact[1]
        for words, of_codes, of_scales in zip(matrices, layout.codes, layout.scales, strict=True):
            codes, scales = mxfp4_codes(words)
            check_same(mxfp4_words(codes, scales), words, self.name)
            part_of(slot, of_codes).view(codes.shape).copy_(codes)
            part_of(slot, of_scales).view(scales.shape).copy_(scales)
        return layout.nbytes

    def words(self, record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        scaled_ops.decode_mxfp4(record, gate_up_proj, down_proj)

    def run(self, *arguments: Any) -> None:
        scaled_ops.moe_grouped_mxfp4(*arguments)


def check_same(found: Tensor, wanted: Tensor, codec: str) -> None:
    """Raise SpeqError unless words are those wanted, bit for bit."""
    if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
        raise SpeqError(
            f"codec {codec} holds experts that were published so, and these words are no codes "
            "times a scale; use codec raw"
        )
