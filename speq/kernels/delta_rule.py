"""The gated delta rule (arXiv:2412.06464), one token after another.

A head has a state S [key width, value width]. A token with decay g, strength b, key k, value v and
query q does

    S = exp(g) S;  S = S + k (b (v - k S));  out = q S

with keys and queries of length 1, and queries divided by the root of their width. Tokens that are
run alone and tokens that are run together go through the same operations in the same order, so that
their results are the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels.convolution import convolved

NORM_EPSILON = 1e-6


class DeltaSizes(NamedTuple):
    """Of one layer. taps: inputs of a channel's convolution, its own token's included."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        keys = self.key_heads * self.key_width
        return 2 * keys + self.value_heads * self.value_width

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_width, self.value_width


class DeltaTokens(NamedTuple):
    """T tokens behind their convolution.

    queries, keys  [T, value heads, key width] float32, normed
    values         [T, value heads, value width] float32
    decays, betas  [T, value heads] float32: g and b
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    betas: Tensor


def mixed_inputs(windows: Tensor, weight: Tensor) -> Tensor:
    """SiLU of each channel's convolution, as `convolved` has it."""
    return functional.silu(convolved(windows, weight))


def heads_of(mixed: Tensor, decays: Tensor, betas: Tensor, sizes: DeltaSizes) -> DeltaTokens:
    """Tokens [T, channels] behind their convolution, by heads. Each head of keys serves
    neighbouring heads of values.
    """
    keys_width = sizes.key_heads * sizes.key_width
    parts = mixed.float().split([keys_width, keys_width, mixed.shape[1] - 2 * keys_width], 1)
    shared = sizes.value_heads // sizes.key_heads
    queries, keys = (
        normed(part.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(shared, 1)
        for part in parts[:2]
    )
    values = parts[2].unflatten(1, (sizes.value_heads, -1))
    return DeltaTokens(queries / sizes.key_width**0.5, keys, values, decays, betas)


def normed(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + NORM_EPSILON)


def delta_steps(state: Tensor, tokens: DeltaTokens) -> Tensor:
    """Run tokens one after another.

    state    [value heads, key width, value width] float32, which they change in place
    returns  [T, value heads, value width] float32
    """
    out = torch.empty_like(tokens.values)
    for at, (query, key, value, decay, beta) in enumerate(zip(*tokens, strict=True)):
        state *= decay.exp()[:, None, None]
        seen = (state * key[:, :, None]).sum(1)
        change = (value - seen) * beta[:, None]
        state += key[:, :, None] * change[:, None]
        out[at] = (state * query[:, :, None]).sum(1)
    return out
