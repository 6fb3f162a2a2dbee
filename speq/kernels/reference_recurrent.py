"""Plain torch versions of the ops of layers that keep states.

The gated delta rule (arXiv:2412.06464), and that of Kimi (arXiv:2510.26692), whose decays are of
each row of a state:

A head has a state S [key width, value width]. A token with decay g, strength b, key k, value v and
query q does

    S = exp(g) S;  S = S + k (b (v - k S));  out = q S

with keys and queries of length 1, and queries divided by the root of their width. The selective
scan of Mamba-2 (arXiv:2405.21060) takes nothing back, and has keys and queries as they are:

    S = exp(g) S;  S = S + k (b v);  out = q S

Shape letters: T tokens, D key width, V value width.
"""

import torch
from torch import Tensor


def delta_rule_out(
    mixed: Tensor, decays: Tensor, betas: Tensor, eps: float, state: Tensor, out: Tensor
) -> None:
    """Run T tokens one after another, bit-identical to running each alone: torch's sums of several
    rows round differently.

    mixed          [T, 2 * key_heads * D + heads * V] float32: queries, keys and values, head by
                   head, not normed yet. Neighbouring heads share a head of keys
    decays         [T, heads] float32: g, or [T, heads, D] of each row of a state
    betas          [T, heads] float32: b
    eps            epsilon of the norms
    state          [heads, D, V] float32, updated in place
    out            [T, heads, V] float32
    """
    heads, key_width, value_width = state.shape
    keys_width = (mixed.shape[1] - heads * value_width) // 2
    for row, decay, beta, made in zip(mixed, decays, betas, out, strict=True):
        queries, keys, values = row.split([keys_width, keys_width, heads * value_width])
        query, key = (
            _normalize(part.reshape(-1, key_width), eps).repeat_interleave(
                heads * key_width // keys_width, 0
            )
            for part in (queries, keys)
        )
        query = query / key_width**0.5
        state *= decay.exp().view(heads, -1, 1)
        seen = (state * key[:, :, None]).sum(1)
        change = (values.reshape(heads, -1) - seen) * beta[:, None]
        state += key[:, :, None] * change[:, None]
        made.copy_((state * query[:, :, None]).sum(1))


def selective_scan_out(
    mixed: Tensor, decays: Tensor, steps: Tensor, state: Tensor, out: Tensor
) -> None:
    """Run T tokens one after another, bit-identical to running each alone.

    steps  [T, heads] float32: b; the others as `delta_rule_out` has them
    """
    heads, key_width, value_width = state.shape
    keys_width = (mixed.shape[1] - heads * value_width) // 2
    for row, decay, step, made in zip(mixed, decays, steps, out, strict=True):
        queries, keys, values = row.split([keys_width, keys_width, heads * value_width])
        query, key = (
            part.reshape(-1, key_width).repeat_interleave(heads * key_width // keys_width, 0)
            for part in (queries, keys)
        )
        state *= decay.exp().view(heads, -1, 1)
        state += key[:, :, None] * (values.reshape(heads, -1) * step[:, None])[:, None]
        made.copy_((state * query[:, :, None]).sum(1))


def _normalize(rows: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + eps)
