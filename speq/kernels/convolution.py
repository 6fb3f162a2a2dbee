"""Depthwise causal convolution over the last tokens of a sequence.

Tokens go through the same operations in the same order whether run alone or together, so results
are bit-identical.
"""

import torch
from torch import Tensor


def convolve(windows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel over its last inputs.

    windows  [T, taps, channels]: each token's inputs up to its own
    weight   [channels, taps]
    bias     [channels]
    returns  [T, channels] of the windows' dtype; 16-bit values are summed in float32
    """
    wide = torch.float64 if windows.dtype == torch.float64 else torch.float32
    total = torch.zeros(windows.shape[0], windows.shape[2], dtype=wide, device=windows.device)
    for tap in range(weight.shape[1]):
        total += windows[:, tap].to(wide) * weight[:, tap].to(wide)
    if bias is not None:
        total += bias.to(wide)
    return total.to(windows.dtype)
