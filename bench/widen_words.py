"""Weights of a widened model: each is shared out over the copies that it reads."""

import torch
from torch import Tensor

# Passes that put what rounding took from a sum back into its finest copy.
MENDING_PASSES = 3


def shared_out(weight: Tensor, count: int, noise: float, generator: torch.Generator) -> Tensor:
    """Each weight [N, K] as `count` copies [N, K, count] that sum to it, as nearly as words can."""
    exact = weight.float()
    parts = (exact / count).unsqueeze(2).expand(-1, -1, count)
    if noise:
        scale = noise * exact.square().mean().sqrt() / count
        drawn = torch.randn(*exact.shape, count, generator=generator).mul_(scale)
        parts = drawn.sub_(drawn.mean(dim=2, keepdim=True)).add_(parts)
    words = parts.to(weight.dtype).contiguous()
    for _ in range(MENDING_PASSES):
        missing = exact - words.sum(dim=2, dtype=torch.float32)
        finest = words.abs().argmin(dim=2, keepdim=True)
        mended = words.gather(2, finest).float() + missing.unsqueeze(2)
        words.scatter_(2, finest, mended.to(weight.dtype))
    return words


def drawn_for(name: str, seed: int) -> torch.Generator:
    """What a tensor's noise is drawn from."""
    return torch.Generator().manual_seed(seed * 1_000_003 + stable_hash(name))


def stable_hash(name: str) -> int:
    """A number for a name that is the same in every process."""
    number = 0
    for character in name.encode():
        number = (number * 131 + character) % 1_000_003
    return number
