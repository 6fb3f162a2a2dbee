"""Codecs of exact experts: the layout of a packed expert in a file or an expert slot.

raw       the checkpoint's plain weights
lossless  11 to 12 bits a BF16 weight, without a draft
residual  under 9 bits a BF16 weight: the residual over the draft's INT4 codes

Experts that were published in fewer bits have codecs of their own (`speq.experts.scaled_codecs`).

Callers never test which codec they have; they ask what it can do. A new codec is a class and a line
of `speq.registries.CODECS`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from speq.errors import OptionError
from speq.experts.int4 import Int4Arena, Int4Expert
from speq.experts.slots import PlainWords, SlotExperts
from speq.files.alignment import align
from speq.files.fp8_settings import SQUARES, Fp8Blocks
from speq.files.packing import Int4Groups
from speq.files.published_format import WORDS
from speq.kernels import compact_ops, ops
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.compact_ops import WHOLE, Part
from speq.kernels.ops import PlainExpert
from speq.registries import CODECS

# gate_up_proj [2F, H], gate over up, or up [F, H] without a gate, and down_proj [H, F].
Matrices = tuple[Tensor, Tensor]
Base = TypeVar("Base", Int4Expert, Int4Arena)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Shape of one expert's matrices: gate_up_proj [2F, H], gate over up, and down_proj [H, F].
    Without a gate, gate_up_proj is up [F, H].

    dtype      of their weights
    published  format in which they were published: plain weights, or codes with scales, which have
               one codec only (`published_format`)
    groups     of INT4; None for other formats
    divides    whether scales of NVFP4's matrices divide those of blocks
    blocks     of FP8
    gated      whether experts have a gate
    """

    hidden_size: int
    expert_width: int
    dtype: torch.dtype
    published: str = WORDS
    groups: Int4Groups | None = None
    divides: bool = False
    blocks: Fp8Blocks = SQUARES
    gated: bool = True

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        return ((2 if self.gated else 1) * self.expert_width, self.hidden_size)

    @property
    def down_shape(self) -> tuple[int, int]:
        return (self.hidden_size, self.expert_width)

    @property
    def weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden_size * self.expert_width

    @property
    def nbytes(self) -> int:
        return self.weights * self.dtype.itemsize

    def empty(self, device: torch.device | None = None) -> Matrices:
        """Allocate both matrices, on the CPU by default."""
        shapes = (self.gate_up_shape, self.down_shape)
        gate_up_proj, down_proj = (
            torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes
        )
        return gate_up_proj, down_proj


class ExpertCodec(Protocol):
    """Codec of experts of one shape, in files and in expert slots.

    A base is an expert's INT4 codes, or all experts'; only codecs that need a draft use it.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_draft(self) -> bool:
        """True if packed experts are decoded over the codes of a draft."""

    @property
    def usual_bits(self) -> float | None:
        """Usual bits per weight of packed experts; None: all have one known size."""

    @property
    def op(self) -> str:
        """Kernel that runs experts out of slots."""

    @property
    def takes(self) -> str:
        """Description of the experts that it can code."""

    @property
    def plain_bytes(self) -> int:
        """Bytes of one expert's plain weights outside its slot, if they are needed."""

    @property
    def shape(self) -> ExpertShape: ...

    @property
    def record_range(self) -> tuple[int, int]:
        """Smallest and largest size of a packed expert, in bytes."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest packed expert, rounded up to whole blocks for direct reads."""

    def with_slot_bytes(self, largest_bytes: int) -> Self:
        """The same codec, with slots for packed experts of at most `largest_bytes`."""

    def encode(
        self, exact: Matrices, base: Int4Expert | None, slot: Tensor, part: Part = WHOLE
    ) -> int:
        """Encode an expert, in the checkpoint's order, into a slot. Return the bytes written.

        slot  [slot_bytes] uint8 on the CPU. Raises SpeqError if it is too small.
        part  of an expert whose matrices come one by one, see `compact_ops.encode_into`; a codec
              may leave all to the last
        """

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        """Decode the matrices in a slot on the CPU, bit-exact; possibly views of the slot.

        With a draft they are in the order of its codes (`Int4Expert.in_order`). Raises SpeqError if
        a base is needed and missing.
        """

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        """Wrap the experts in slots [S, slot_bytes] uint8 for running them."""


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Plain weights in the checkpoint's dtype: gate if there is one, up, down, each row by row."""

    name: ClassVar[str] = "raw"
    needs_draft: ClassVar[bool] = False
    usual_bits: ClassVar[float | None] = None
    op: ClassVar[str] = "moe_grouped"
    takes: ClassVar[str] = "words"
    plain_bytes: ClassVar[int] = 0
    shape: ExpertShape

    @classmethod
    def codes(cls, shape: ExpertShape) -> bool:
        """True if the codec can code such experts."""
        return shape.published == WORDS

    @property
    def record_bytes(self) -> int:
        return self.shape.nbytes

    @property
    def record_range(self) -> tuple[int, int]:
        return self.record_bytes, self.record_bytes

    @property
    def slot_bytes(self) -> int:
        return align(self.record_bytes)

    def with_slot_bytes(self, largest_bytes: int) -> "RawCodec":
        return self

    def encode(
        self, exact: Matrices, base: Int4Expert | None, slot: Tensor, part: Part = WHOLE
    ) -> int:
        for matrix, words in zip(exact, self.decode(slot), strict=True):
            words.copy_(matrix)
        return self.record_bytes

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        gate_up_proj, down_proj = self._matrices(slot.unsqueeze(0))
        return gate_up_proj[0], down_proj[0]

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        matrices = gate_up_proj, down_proj = self._matrices(slots)

        def plain(expert: int, slot: int) -> PlainExpert:
            return PlainExpert(gate_up_proj[slot], down_proj[slot])

        return SlotExperts(ops.moe_grouped, lambda layer: matrices, lambda layer: plain)

    def _matrices(self, slots: Tensor) -> Matrices:
        """View slots [S, slot_bytes] uint8 as gate_up_proj [S, 2F, H] and down_proj [S, H, F]."""
        shape = self.shape
        words = slots.view(shape.dtype)[:, : shape.weights]
        split = math.prod(shape.gate_up_shape)
        gate_up_proj = words[:, :split].unflatten(1, shape.gate_up_shape)
        return gate_up_proj, words[:, split:].unflatten(1, shape.down_shape)


@dataclass(frozen=True, slots=True)
class CompactCodec:
    """Codec of the formats of `speq.kernels.compact_layout`, whose packed experts differ in size.

    largest_bytes  of a packed expert; None: the largest possible
    """

    name: ClassVar[str]
    needs_draft: ClassVar[bool]
    usual_bits: ClassVar[float | None]
    op: ClassVar[str]
    takes: ClassVar[str] = "bfloat16"
    shape: ExpertShape
    largest_bytes: int | None = None

    @classmethod
    def codes(cls, shape: ExpertShape) -> bool:
        """True if the codec can code such experts. FP16 would save 11 % of its 16 bits."""
        return shape.published == WORDS and shape.dtype == torch.bfloat16

    @property
    def layout(self) -> CompactLayout:
        shape, lossless = self.shape, not self.needs_draft
        return CompactLayout.of_expert(shape.hidden_size, shape.expert_width, lossless, shape.gated)

    @property
    def plain_bytes(self) -> int:
        return self.shape.nbytes

    @property
    def record_range(self) -> tuple[int, int]:
        return self.layout.fixed_bytes, self.layout.most_bytes

    @property
    def slot_bytes(self) -> int:
        return align(self.largest_bytes or self.layout.most_bytes)

    def with_slot_bytes(self, largest_bytes: int) -> Self:
        return replace(self, largest_bytes=largest_bytes)


@dataclass(frozen=True, slots=True)
class LosslessCodec(CompactCodec):
    """Lossless codec: the low byte of each word, and a 3-bit class for its high byte."""

    name: ClassVar[str] = "lossless"
    needs_draft: ClassVar[bool] = False
    # `speq pack models/tiny-moe --codec lossless` prints 11.31.
    usual_bits: ClassVar[float | None] = 11.4
    op: ClassVar[str] = "moe_grouped_lossless"

    def encode(
        self, exact: Matrices, base: Int4Expert | None, slot: Tensor, part: Part = WHOLE
    ) -> int:
        return compact_ops.encode_into(*exact, slot, part=part)

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        matrices = self.shape.empty()
        compact_ops.decode(slot, *matrices)
        return matrices

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        held = slots, self.shape.expert_width
        plain = plain_in(slots, self.shape, compact_ops.decode)
        return SlotExperts(compact_ops.moe_grouped_lossless, lambda layer: held, plain)


@dataclass(frozen=True, slots=True)
class ResidualCodec(CompactCodec):
    """Residual codec over INT4 codes: each word's low byte, and a little more for codes 0."""

    name: ClassVar[str] = "residual"
    needs_draft: ClassVar[bool] = True
    # 8.63 over rounded codes; up to 9 over codes that GPTQ moved.
    usual_bits: ClassVar[float | None] = 8.9
    op: ClassVar[str] = "moe_grouped_residual"

    def encode(
        self, exact: Matrices, base: Int4Expert | None, slot: Tensor, part: Part = WHOLE
    ) -> int:
        base = require_base(base)
        if base.reorders:  # which takes all matrices
            if part.end < WHOLE.end:
                return 0
            exact, part = base.in_order(*exact), WHOLE
        return compact_ops.encode_into(*exact, slot, base.gate_up, base.down, part=part)

    def decode(self, slot: Tensor, base: Int4Expert | None = None) -> Matrices:
        base = require_base(base)
        matrices = self.shape.empty()
        compact_ops.decode(slot, *matrices, base.gate_up, base.down)
        return matrices

    def experts(self, slots: Tensor, base: Int4Arena | None) -> SlotExperts:
        base = require_base(base)
        codes, base_slots = base.experts, base.base_slots
        held = [(slots, of_layer, codes) for of_layer in base_slots.unbind()]
        on_host = base_slots.tolist()  # now, to avoid reading the device later

        def plain(layer: int) -> PlainWords:
            words = self.shape.empty(slots.device)

            def read(expert: int, slot: int) -> PlainExpert:
                gate_up, down, input_perm = codes.expert(on_host[layer][expert])
                compact_ops.decode(slots[slot], *words, gate_up, down)
                return PlainExpert(*words, input_perm)

            return read

        return SlotExperts(compact_ops.moe_grouped_residual, held.__getitem__, plain)


def plain_in(
    slots: Tensor, shape: ExpertShape, decode: Callable[..., None]
) -> Callable[[int], PlainWords]:
    """Plain experts of any layer out of slots, each decoded where the one before it was."""

    def plain(layer: int) -> PlainWords:
        matrices = shape.empty(slots.device)

        def read(expert: int, slot: int) -> PlainExpert:
            decode(slots[slot], *matrices)
            return PlainExpert(*matrices)

        return read

    return plain


def require_base(base: Base | None) -> Base:
    """Return a draft's codes. Raises SpeqError without them."""
    if base is None:
        raise OptionError(
            "these experts are packed as residuals, which only decode with their draft; give "
            "the model they were packed from"
        )
    return base


def codec_of(name: str, shape: ExpertShape) -> ExpertCodec:
    """Find the codec of that name. Raises SpeqError for experts that it cannot code."""
    made = CODECS[name]
    if not made.codes(shape):
        given = str(shape.dtype).removeprefix("torch.")
        if shape.published != WORDS:
            given = f"published in {shape.published}"
        raise OptionError(
            f"codec {name} codes {made.takes} and the model's experts are {given}; use codec "
            f"{' or '.join(codecs_for(shape))}"
        )
    codec: ExpertCodec = made(shape)
    return codec


def codecs_for(shape: ExpertShape) -> tuple[str, ...]:
    """Names of the codecs of such experts."""
    return tuple(name for name in CODECS.names if CODECS[name].codes(shape))


def own_codec(shape: ExpertShape) -> ExpertCodec:
    """The codec of experts in their published format."""
    return codec_of("raw" if shape.published == WORDS else shape.published, shape)


def usual_bytes(codec: ExpertCodec) -> int:
    """Usual bytes of a packed expert, before any is known."""
    if codec.usual_bits is None:
        return codec.slot_bytes
    return align(int(codec.usual_bits * codec.shape.weights / 8))
