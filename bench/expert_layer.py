"""Layers of experts with random weights, of the shapes that published models have."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from speq.ops import ACTIVATIONS, Int4Bank

ACTIVATION = "silu"
# Weights repeat after so many; caches go by address and do not notice.
BLOCK_WEIGHTS = 1 << 20
SEED = 0


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

    forms   whether (INT4, exact) experts are needed
    places  [N]: expert n lies in slot n
    bank    INT4; exact  gate_up_proj [N, 2F, H] and down_proj [N, H, F]; of no experts if unneeded
    """

    def __init__(
        self,
        shape: LayerShape,
        held: int,
        forms: tuple[bool, bool],
        group_size: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.places = torch.arange(held, device=device)
        hidden, width, size = shape.hidden_size, shape.expert_width, group_size
        generator = torch.Generator().manual_seed(SEED)
        codes = torch.randint(256, (BLOCK_WEIGHTS,), dtype=torch.uint8, generator=generator)
        scales = torch.rand(BLOCK_WEIGHTS, generator=generator).mul_(0.01).half()
        weights = torch.randn(BLOCK_WEIGHTS, generator=generator).mul_(0.02).bfloat16()
        int4, exact = (held if needed else 0 for needed in forms)
        self.bank = Int4Bank(
            (
                repeated(codes, (int4, 2 * width, hidden // 2), device),
                repeated(scales, (int4, 2 * width, hidden // size), device),
            ),
            (
                repeated(codes, (int4, hidden, width // 2), device),
                repeated(scales, (int4, hidden, width // size), device),
            ),
        )
        self.exact = (
            repeated(weights, (exact, 2 * width, hidden), device),
            repeated(weights, (exact, hidden, width), device),
        )


def repeated(block: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor filled with copies of `block`: random numbers for all of it would take minutes."""
    out = torch.empty(shape, dtype=block.dtype, device=device)
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
        outputs = F.linear(ACTIVATIONS[ACTIVATION](gate) * up, down_proj[expert])
        outputs = outputs * topk_weights[rows, ranks, None]
        out.index_add_(0, rows, outputs.to(out.dtype))
    return out.to(hidden_states.dtype)
