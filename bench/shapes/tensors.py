"""Tensors of a checkpoint in exact shapes and names, and how the weights of each are drawn.

Hidden unit 0 is the same for all tokens: only the embedding writes it, and routers read their
experts' biases from it (`speq.bench.shapes.routes`). What layers add is small beside the embedding,
so the routers of all layers see inputs of one law.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import torch
from torch import Tensor

from speq.bench.shapes.published import INT4_GROUP
from speq.bench.shapes.routes import biases
from speq.experts.expert_names import FUSED, PROJECTIONS, Stacked
from speq.files import published_format as form
from speq.files.fp8_settings import INVERSE, SQUARES
from speq.files.packing import COMPRESSED, MODELOPT, MXFP4_BLOCK, NVFP4_BLOCK
from speq.models.bounds import EMBEDDING, LAYER
from speq.models.family import Family
from speq.models.shape import SKELETON_DTYPE, ModelShape, skeleton

# Spread of the embedding, and what a layer adds as a share of it.
EMBEDDED, ADDED = 0.05, 0.05
# Unit 0 of an embedding, over EMBEDDED and the root of the hidden size.
SAME = 0.5
# Spread of router logits, and of the head's, which tokens are sampled by.
ROUTED, SCORED = 1.5, 1.0
# In FP8 a weight of 1 spread has this code's value; so few codes are clamped.
FP8_SPREAD = 100.0
# Root mean square of the values of MXFP4 codes, each as often as the others.
MXFP4_SPREAD = 2.93
# The same of INT4 codes less 8, and eight of those that stand for 0.
INT4_SPREAD, INT4_ZEROS = 4.64, -0x77777778
# Publishers leave these in 16 bits.
PLAIN = re.compile(
    r"embed_tokens|embeddings|lm_head|norm|router|\.gate\.|_gate\.|in_proj_[ab]\.|conv1d|\.bias$"
)
# What layers end with, and what experts of all kinds do.
ENDS = re.compile(r"\.(o_proj|out_proj|down_proj)(\.weight|_blocks)?$")
# Families whose norms multiply by 1 + weight; delta nets' own norm does not.
FROM_ZERO = ("qwen3_next", "qwen3_5_moe")
NORM_AFTER = re.compile(r"\.(post_attention_layernorm|post_feedforward_layernorm)\.weight$")
WORD_POOL = (1 << 22) + 3


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor to draw.

    spread  standard deviation of its weights; of codes, of what they stand for
    mean    what they all are where spread is 0
    row, column  what the first row or column of each matrix is in place of drawn weights
    router  (experts, top_k) of a router's weight; mean is then what its biases are multiplied by
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    spread: float = 0.0
    mean: float = 0.0
    row: float | None = None
    column: float | None = None
    router: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightPool:
    """Random words that tensors are filled from, each from a place of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        words = torch.randn(WORD_POOL, generator=self._generator)
        codes = (words * FP8_SPREAD).clamp(-448, 448).to(form.FP8_DTYPE)
        nibbles = torch.randint(256, (WORD_POOL,), dtype=torch.uint8, generator=self._generator)
        numbers = torch.randint(-(1 << 31), 1 << 31, (WORD_POOL,), generator=self._generator)
        self._pools = {
            torch.bfloat16: words.bfloat16(),
            torch.float32: words,
            form.FP8_DTYPE: codes,
            form.MXFP4_DTYPE: nibbles,
            form.INT4_DTYPE: numbers.int(),
        }

    def draw(self, wanted: RandomTensor) -> Tensor:
        """Draw a tensor."""
        if not wanted.spread:
            return torch.full(wanted.shape, wanted.mean).to(wanted.dtype)
        made = torch.empty(wanted.shape, dtype=wanted.dtype)
        pool, flat = self._pools[wanted.dtype], made.view(-1)
        at = int(torch.randint(WORD_POOL, (1,), generator=self._generator))
        done = 0
        while done < len(flat):
            part = pool[at : at + len(flat) - done]
            flat[done : done + len(part)] = part
            done, at = done + len(part), 0
        if wanted.dtype.is_floating_point and wanted.dtype.itemsize > 1:
            made *= wanted.spread
        if wanted.row is not None and wanted.dtype == form.INT4_DTYPE:
            made[0] = INT4_ZEROS
        elif wanted.row is not None:
            # Of MXFP4 [E, N, K / 32, 16], of others [..., N, K].
            made.select(1 if made.dim() == 4 else -2, 0).view(torch.uint8).zero_()
        if wanted.column is not None:
            made[..., 0] = wanted.column
        if wanted.router is not None:
            order = torch.randperm(wanted.router[0], generator=self._generator)
            made[:, 0] = (wanted.mean * biases(*wanted.router))[order].to(made.dtype)
        return made


def tensors_of(family: Family, config: Any, shape: ModelShape, weights: str) -> list[RandomTensor]:
    """List the tensors of a checkpoint in the order of layers. config: as transformers has it"""
    part = family.text_part
    found: list[RandomTensor] = []
    model = skeleton(family, config, "the shapes")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and shape.tied:
            continue
        dtype = torch.float32 if tensor.dtype != SKELETON_DTYPE else torch.bfloat16
        sizes = tuple(tensor.shape)
        found += coded(_dense(RandomTensor(name, sizes, dtype), family, shape), weights)
    for layer in shape.experts.layers:
        found += _experts(family, shape, layer, weights)
    found = [each if part is None else replace(each, name=part.stored(each.name)) for each in found]
    return sorted(found, key=_order)


def _order(tensor: RandomTensor) -> tuple[int, int]:
    """Sort layers in order, the embedding before and the rest behind them."""
    layer = LAYER.search(tensor.name)
    return (2 * (EMBEDDING.search(tensor.name) is None), 0) if layer is None else (1, int(layer[1]))


def _dense(tensor: RandomTensor, family: Family, shape: ModelShape) -> RandomTensor:
    """Say how a tensor outside the experts is drawn."""
    name, hidden = tensor.name, shape.hidden_size
    if family.names.router.search(name):
        unit = (1 + SAME**2) ** 0.5 / hidden**0.5
        chosen = shape.experts.num_experts, shape.top_k
        return replace(tensor, spread=unit * ROUTED, mean=unit * ROUTED / SAME, router=chosen)
    if EMBEDDING.search(name):
        return replace(tensor, spread=EMBEDDED, column=EMBEDDED * SAME * hidden**0.5)
    if name == "lm_head.weight":
        return replace(tensor, spread=SCORED * hidden**-0.5, column=0.0)
    if name.endswith(".router.scale"):
        return replace(tensor, mean=hidden**0.5)  # which the family divides by
    if len(tensor.shape) > 1:
        spread = prod(tensor.shape[1:]) ** -0.5
        if not ENDS.search(name):
            return replace(tensor, spread=spread)
        return replace(tensor, spread=spread * ADDED * EMBEDDED, row=0.0)
    if family.normed and NORM_AFTER.search(name):
        return replace(tensor, mean=ADDED * EMBEDDED * hidden**0.5)
    if shape.tied and name == "model.norm.weight":
        # Else each token would be likeliest behind itself.
        return replace(tensor, mean=SCORED / EMBEDDED / hidden)
    zero = name.endswith(("bias", "sinks", "A_log")) or (
        family.model_type in FROM_ZERO and not name.endswith("linear_attn.norm.weight")
    )
    return replace(tensor, mean=0.0 if zero else 1.0)


def _experts(family: Family, shape: ModelShape, layer: int, weights: str) -> Iterator[RandomTensor]:
    """List a layer's experts as the family is published."""
    experts, names = shape.experts, family.names
    count, hidden, width = experts.num_experts, experts.hidden_size, experts.expert_width
    spreads = dict(zip(PROJECTIONS, (hidden**-0.5,) * 2 + (width**-0.5,), strict=True))
    spreads["down_proj"] *= ADDED * EMBEDDED
    prefix = names.module(layer, 0, PROJECTIONS[1]).removesuffix(f"0.{names.projections[0][1]}")
    fused = {FUSED[0]: (2 * width, hidden), FUSED[1]: (hidden, width)}
    fuses = family.text_part is not None or family.biased or weights == form.MXFP4
    together = fuses and weights != form.FP8 and experts.gated
    for name, (rows, columns) in fused.items() if together else ():
        spread = spreads.get(name, spreads["up_proj"])
        zero = 0.0 if name == FUSED[1] else None
        plain = RandomTensor(prefix + name, (count, rows, columns), spread=spread)
        if weights != form.MXFP4:
            turned = replace(plain, shape=(count, columns, rows), column=zero)
            yield replace(plain, row=zero) if family.stacked is Stacked.ROWS else turned
            continue
        blocks = (count, rows, columns // MXFP4_BLOCK)
        codes = replace(plain, name=plain.name + form.BLOCKS, dtype=form.MXFP4_DTYPE, row=zero)
        yield replace(codes, shape=(*blocks, form.MXFP4_BLOCK_BYTES))
        power = round(log2(spread / MXFP4_SPREAD)) + 127
        yield RandomTensor(plain.name + form.BLOCK_SCALES, blocks, form.MXFP4_DTYPE, mean=power)
    if together:
        return
    for expert in range(count):
        for name, projection in zip(names.projections[-1], PROJECTIONS, strict=True):
            if projection not in experts.projections:
                continue
            down = projection == "down_proj"
            sizes = (hidden, width) if down else (width, hidden)
            plain = RandomTensor(f"{prefix}{expert}.{name}.weight", sizes)
            spread = spreads[projection]
            yield from coded(replace(plain, spread=spread, row=0.0 if down else None), weights)


def coded(tensor: RandomTensor, weights: str) -> list[RandomTensor]:
    """Put a matrix into codes and scales where publishers do."""
    scaled = weights in (form.FP8, form.INT4, form.NVFP4)
    if not scaled or len(tensor.shape) != 2 or PLAIN.search(tensor.name):
        return [tensor]
    if weights == form.INT4:
        return packed(tensor)
    if weights == form.NVFP4:
        return packed_nvfp4(tensor)
    rows, columns = SQUARES.scales_shape(*tensor.shape)
    scale = tensor.spread / FP8_SPREAD
    scales = RandomTensor(tensor.name + INVERSE, (rows, columns), torch.float32, mean=scale)
    return [replace(tensor, dtype=form.FP8_DTYPE), scales]


def packed(tensor: RandomTensor) -> list[RandomTensor]:
    """Put a matrix into INT4 as compressed-tensors packs it, but for the tensor of its shape."""
    rows, columns = tensor.shape
    module = tensor.name.removesuffix(form.PLAIN)
    codes = replace(tensor, name=module + COMPRESSED.codes, dtype=form.INT4_DTYPE)
    shape, scale = (rows, columns // INT4_GROUP), tensor.spread / INT4_SPREAD
    return [
        replace(codes, shape=COMPRESSED.codes_shape(rows, columns)),
        RandomTensor(module + COMPRESSED.scales, shape, torch.bfloat16, mean=scale),
    ]


def packed_nvfp4(tensor: RandomTensor) -> list[RandomTensor]:
    """Put a matrix into NVFP4 as ModelOpt packs it, with all blocks under one scale."""
    rows, columns = tensor.shape
    module, blocks = tensor.name.removesuffix(form.PLAIN), (rows, columns // NVFP4_BLOCK)
    scale = tensor.spread / MXFP4_SPREAD
    codes = replace(tensor, shape=MODELOPT.codes_shape(rows, columns), dtype=MODELOPT.dtype)
    return [
        codes,
        RandomTensor(module + MODELOPT.scales, blocks, form.FP8_DTYPE, mean=1.0),
        RandomTensor(module + MODELOPT.third, (), torch.float32, mean=scale),
    ]
