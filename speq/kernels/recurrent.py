"""Rules of layers that keep states, one token after another.

They are the gated delta rule (arXiv:2412.06464), also with decays of channels as Kimi has them
(arXiv:2510.26692), and the selective scan of Mamba-2 (arXiv:2405.21060);
`speq.kernels.reference_recurrent` defines a token's step. Tokens go through the same operations in
the same order whether run alone or together, so results are bit-identical.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels import library
from speq.kernels.convolution import convolve

NORM_EPSILON = 1e-6


class RecurrentSizes(NamedTuple):
    """Sizes of one layer.

    taps        inputs of a channel's convolution, its own token's included
    by_channel  whether each channel of a key has a decay of its own, not each head
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    by_channel: bool = False

    @property
    def decays(self) -> tuple[int, ...]:
        """Shape of a token's decays."""
        return (self.value_heads, self.key_width) if self.by_channel else (self.value_heads,)

    @property
    def channels(self) -> int:
        """Width of queries, keys and values side by side."""
        keys = self.key_heads * self.key_width
        return 2 * keys + self.value_heads * self.value_width

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_width, self.value_width


def mix_inputs(windows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """SiLU of each channel's convolution, see `convolve`: [T, channels] of its dtype."""
    return functional.silu(convolve(windows, weight, bias))


def mix_one_by_one(windows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `mix_inputs` for a few tokens, bit-identical to running each alone: torch's functions
    of several rows round differently.
    """
    return torch.cat([functional.silu(row) for row in convolve(windows, weight, bias).split(1)])


def delta_steps(state: Tensor, mixed: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
    """Run T tokens one after another.

    state    [value heads, key width, value width] float32, updated in place
    mixed    [T, channels], the output of `mix_inputs`
    decays   [T, value heads] float32, or [T, value heads, key width]; betas [T, value heads]
    returns  [T, value heads, value width] float32
    """
    out = state.new_empty(len(mixed), state.shape[0], state.shape[2])
    library.call("delta_rule", mixed.float(), decays, betas, NORM_EPSILON, state, out)
    return out


def selective_scan(state: Tensor, mixed: Tensor, decays: Tensor, steps: Tensor) -> Tensor:
    """Run T tokens one after another.

    mixed  [T, channels] float32: queries, keys and values
    steps  [T, value heads] float32; the others as `delta_steps` has them
    """
    out = state.new_empty(len(mixed), state.shape[0], state.shape[2])
    library.call("selective_scan", mixed, decays, steps, state, out)
    return out
