"""Layers of experts with random weights, of the shapes that published models have."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from speq.errors import OptionError
from speq.experts.codec import ExpertShape, own_codec
from speq.experts.random_expert import random_expert
from speq.files.alignment import align, allocate_aligned, prefer_huge_pages
from speq.files.packing import Int4Groups
from speq.kernels import compact_ops
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.ops import ACTIVATIONS, Activation, Int4Slots, quantize_int4
from speq.kernels.scaled_layout import (
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)

ACTIVATION = Activation("silu")
# Weights repeat after so many; caches go by address and do not notice.
BLOCK_WEIGHTS = 1 << 20
SEED = 0
# Groups of the experts that are published in INT4.
INT4_GROUPS = Int4Groups(32, False)
# Forms of experts that are published so.
SCALED: dict[str, Callable[[int, int], ScaledLayout]] = {
    "fp8": Fp8Layout,
    "mxfp4": Mxfp4Layout,
    "nvfp4": Nvfp4Layout,
    "published int4": lambda hidden, width: Int4GroupsLayout(hidden, width, *INT4_GROUPS),
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The experts of one layer, as a published model has them."""

    name: str
    hidden_size: int
    expert_width: int
    top_k: int
    num_experts: int

    @property
    def weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def exact_bytes(self) -> int:
        """Bytes of one expert in bfloat16."""
        return 2 * self.weights

    def int4_bytes(self, group_size: int) -> int:
        """Bytes of one expert's codes and scales."""
        return self.weights // 2 + 2 * self.weights // group_size

    def check_group_size(self, size: int) -> None:
        """Raise SpeqError for groups that do not divide the columns."""
        if size % 2 or self.hidden_size % size or self.expert_width % size:
            raise OptionError(
                f"group_size is {size}; it must be even and divide the {self.hidden_size} and "
                f"{self.expert_width} columns of {self.name}"
            )

    def most_bytes(self, form: str, group_size: int) -> int:
        """Bytes of one expert in a form of `Layer`, at the most: records of random weights take
        less than a tenth more than their fixed parts."""
        if form == "exact":
            return self.exact_bytes
        if form == "int4":
            return self.int4_bytes(group_size)
        if form in SCALED:
            return align(SCALED[form](self.hidden_size, self.expert_width).nbytes)
        layout = CompactLayout.of_expert(self.hidden_size, self.expert_width, form == "lossless")
        return align(int(1.1 * layout.fixed_bytes))


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape("qwen1.5-moe", 2048, 1408, 4, 60),
        LayerShape("deepseek-v2-lite", 2048, 1408, 6, 64),
        LayerShape("phi-3.5-moe", 4096, 6400, 2, 16),
        LayerShape("olmoe", 2048, 1024, 8, 64),
        LayerShape("qwen3-30b-a3b", 2048, 768, 8, 128),
        LayerShape("mixtral-8x7b", 4096, 14336, 2, 8),
    )
}


class Layer:
    """The experts that are held, with random weights, in the forms that kernels need.

    forms     of "exact", "int4", "lossless", "residual", and of SCALED; what is not needed is of no
              experts
    places    [N]: expert n lies in slot n
    exact     gate_up_proj [N, 2F, H] and down_proj [N, H, F]
    bank      INT4
    slots     by form, [N, slot_bytes] records, of residuals over the bank: all of the same expert,
              which caches do not notice
    """

    def __init__(
        self,
        shape: LayerShape,
        held: int,
        forms: frozenset[str],
        group_size: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.places = torch.arange(held, device=device)
        self._records: dict[str, Tensor] = {}
        hidden, width = shape.hidden_size, shape.expert_width
        generator = torch.Generator().manual_seed(SEED)
        weights = torch.randn(BLOCK_WEIGHTS, generator=generator).mul_(0.02).bfloat16()
        exact, int4 = (held if form in forms else 0 for form in ("exact", "int4"))
        one = (
            repeat_layer(weights, (2 * width, hidden), torch.device("cpu")),
            repeat_layer(weights, (hidden, width), torch.device("cpu")),
        )
        codes = [pair_of(matrix, group_size, "residual" in forms) for matrix in one]
        self.backend = Int4Slots(
            (copies(codes[0][0], int4, device), copies(codes[0][1], int4, device)),
            (copies(codes[1][0], int4, device), copies(codes[1][1], int4, device)),
        )
        self.exact = (
            repeat_layer(weights, (exact, 2 * width, hidden), device),
            repeat_layer(weights, (exact, hidden, width), device),
        )
        if "lossless" in forms:
            self._records["lossless"] = compact_ops.encode(*one)
        if "residual" in forms:
            self._records["residual"] = compact_ops.encode(*one, *codes)
        for form in SCALED.keys() & forms:
            self._records[form] = scaled_record(form, shape, generator)
        self.slots = {form: self._slots(form, held, device) for form in self._records}

    def expert_bytes(self, form: str, group_size: int) -> int:
        """Bytes of one expert in a form that is held."""
        if form in self._records:
            return len(self._records[form])
        return self.shape.most_bytes(form, group_size)

    def _slots(self, form: str, held: int, device: torch.device) -> Tensor:
        record = self._records[form]
        slots = allocate_aligned(held, align(len(record)), device).zero_()
        slots[:, : len(record)] = record.to(device)
        return slots


def scaled_record(form: str, shape: LayerShape, generator: torch.Generator) -> Tensor:
    """The record of an expert of random weights, published in a form of SCALED."""
    groups = INT4_GROUPS if form == "published int4" else None
    published = form.removeprefix("published ")
    sizes = shape.hidden_size, shape.expert_width
    codec = own_codec(ExpertShape(*sizes, torch.bfloat16, published, groups))
    slot = allocate_aligned(1, codec.slot_bytes)[0]
    return slot[: codec.encode(random_expert(codec.shape, generator), None, slot)]


def pair_of(matrix: Tensor, group_size: int, rounded: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix: rounded, which takes its time, or else random."""
    if rounded:
        return quantize_int4(matrix, group_size)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(SEED)
    codes = torch.randint(256, (BLOCK_WEIGHTS,), dtype=torch.uint8, generator=generator)
    scales = torch.rand(BLOCK_WEIGHTS, generator=generator).mul_(0.01).half()
    cpu = torch.device("cpu")
    return (
        repeat_layer(codes, (rows, columns // 2), cpu),
        repeat_layer(scales, (rows, columns // group_size), cpu),
    )


def copies(part: Tensor, count: int, device: torch.device) -> Tensor:
    """[count, ...] of the same, in such memory as a model's weights have."""
    made = torch.empty(count, *part.shape, dtype=part.dtype, device=device)
    if not made.is_cuda:
        prefer_huge_pages(made)
    return made.copy_(part)


def repeat_layer(block: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor filled with copies of `block`: random numbers for all of it would take minutes."""
    out = torch.empty(shape, dtype=block.dtype, device=device)
    if not out.is_cuda:
        prefer_huge_pages(out)
    block = block.to(device)
    for part in out.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
    return out


def torch_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> Tensor:
    """The loop over experts of transformers' eager MoE, in the dtype of the weights."""
    inputs = hidden_states.to(gate_up_proj.dtype)
    out = torch.zeros_like(inputs)
    mask = F.one_hot(topk_ids, len(gate_up_proj)).permute(2, 1, 0)
    for expert in mask.sum(dim=(1, 2)).nonzero().flatten().tolist():
        ranks, rows = torch.where(mask[expert])
        gate, up = F.linear(inputs[rows], gate_up_proj[expert]).chunk(2, dim=-1)
        outputs = F.linear(ACTIVATIONS[ACTIVATION.name](gate, up), down_proj[expert])
        outputs = outputs * topk_weights[rows, ranks, None]
        out.index_add_(0, rows, outputs.to(out.dtype))
    return out.to(hidden_states.dtype)
