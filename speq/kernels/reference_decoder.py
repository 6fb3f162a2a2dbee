"""Plain torch versions of decoder layers' ops between matrix products, as in transformers.

Shape letters: R or T rows, H hidden, E experts, K experts of a route, D columns of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speq.kernels import reference


def rms_norm_out(
    inputs: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
    sums: Tensor | None,
    out: Tensor,
) -> None:
    """Write the RMS norm of rows [R, H] to out [R, H], both of one dtype.

    added   [R, H] or None: added to inputs first; the sum is written to sums [R, H]
    weight  [G * H], of G rows after one another, of the rows' dtype: they are rounded to it before
            they are multiplied; or float32: they are rounded once, at the end
    """
    if added is not None and sums is not None:
        inputs = sums.copy_(inputs + added)
    wide = inputs.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    groups = weight.view(-1, inputs.shape[1])
    out.copy_((groups * normed.to(weight.dtype).view(-1, *groups.shape)).view(out.shape))


def attention_out(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    start: int,
    window: int,
    scale: float,
    parents: Tensor | None,
    out: Tensor,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    """Write the KV of T tokens to a cache and attend over it: a chain, or the last T of a tree's N
    nodes. The KV of all nodes is contiguous, and a node sees the KV before the tree, its own and
    its ancestors'.

    queries, keys        [T, heads * D] and [T, kv_heads * D]; all of one dtype
    values, out          [T, kv_heads * V] and [T, heads * V]
    query_norm, key_norm [n] or None: weights of RMS norms over n neighbouring columns each, with
                         `eps`, before rotary embeddings
    cos, sin             [T, R]: rotary embeddings of the first R columns of a head, R at most D and
                         even
    cached_keys, cached_values  [kv_heads, C, D] and [kv_heads, C, V]; the rows' KV is written from
                         `start` on
    window               most positions that a row looks back, its own included
    scale                factor of the scores
    parents              [N] int64, parent of each node, parents first and -1 for the root; None: a
                         chain
    sinks                [heads] or None: each head's sink score, which takes its share of the
                         weights
    chosen               [T, N] bool, N at least start + T: what a row attends to, of what it sees;
                         None: all
    """
    rows, (kv_heads, _, width) = len(queries), cached_keys.shape
    end = start + rows
    turned = [
        _rotate(_norm(tensor, weight, eps), width, cos, sin)
        for tensor, weight in ((queries, query_norm), (keys, key_norm))
    ]
    cached_keys[:, start:end] = turned[1]
    cached_values[:, start:end] = values.view(rows, kv_heads, cached_values.shape[2]).transpose(
        0, 1
    )
    group = queries.shape[1] // (kv_heads * width)
    seen_keys, seen_values = (
        cached[:, :end].repeat_interleave(group, 0) for cached in (cached_keys, cached_values)
    )
    visible = _visible(rows, start, window, parents)
    if chosen is not None:
        visible &= chosen[:, :end]
    if sinks is None:
        attended = F.scaled_dot_product_attention(
            turned[0][None], seen_keys[None], seen_values[None], attn_mask=visible, scale=scale
        )[0]
    else:
        attended = attend_with_sinks(turned[0], seen_keys, seen_values, visible, scale, sinks)
    out.copy_(attended.transpose(0, 1).reshape(rows, -1))


def latent_attention_out(
    queries: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    expansion: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cached_latents: Tensor,
    cached_rotary: Tensor,
    start: int,
    window: int,
    scale: float,
    parents: Tensor | None,
    out: Tensor,
    chosen: Tensor | None = None,
) -> None:
    """Multi-head latent attention (MLA, arXiv:2405.04434) of T tokens, a chain or a tree's last
    nodes, as in `attention_out`: it caches latents, which are expanded to heads of keys and values.

    queries         [T, heads * (D + R)], R rotated columns behind D others in each head; all
                    tensors of one dtype
    latents         [T, L + R]: latents, not yet normed, and the key columns that are rotated
    norm            [L], weight of the latents' RMS norm, with `eps`
    expansion       [heads * (D + V), L]: in each head, what makes keys and then values of a latent
    cos, sin        [T, R]; or float32 [T, R / 2], of neighbours that are rotated as complex
                    numbers and stay neighbours
    interleaved     the columns that are rotated together are neighbours
    cached_latents, cached_rotary  [1, C, L] and [1, C, R]; the rows' KV is written from `start` on
    out             [T, heads * V]
    chosen          as `attention_out` has it
    """
    rows, rank, rotary = len(queries), cached_latents.shape[2], cached_rotary.shape[2]
    end = start + rows
    heads = (queries.shape[1] + out.shape[1] - len(expansion)) // rotary
    key_width = queries.shape[1] // heads - rotary
    split = queries.view(rows, heads, -1).transpose(0, 1)
    turned = _rotate_columns(split[..., key_width:], cos, sin, interleaved)
    cached_latents[0, start:end] = _norm(latents[:, :rank], norm, eps)
    cached_rotary[0, start:end] = _rotate_columns(latents[:, rank:], cos, sin, interleaved)
    expanded = F.linear(cached_latents[0, :end], expansion).view(end, heads, -1).transpose(0, 1)
    visible = _visible(rows, start, window, parents)
    if chosen is not None:
        visible &= chosen[:, :end]
    rotated_keys = cached_rotary[:, :end].expand(heads, -1, -1)
    attended = F.scaled_dot_product_attention(
        torch.cat((split[..., :key_width], turned), dim=-1)[None],
        torch.cat((expanded[..., :key_width], rotated_keys), dim=-1)[None],
        expanded[..., key_width:][None],
        attn_mask=visible,
        scale=scale,
    )[0]
    out.copy_(attended.transpose(0, 1).reshape(rows, -1))


def masked_attention_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of T tokens over N, of which a mask says what each one sees.

    query  [heads, T, D]; key and value [kv_heads, N, D] and [kv_heads, N, V], of one dtype
    mask   [T, N] bool, true where seen
    scale  factor of the scores
    sinks  [heads] or None, as in `attention_out`
    out    [T, heads, V]
    """
    group = len(query) // len(key)
    keys, values = (each.repeat_interleave(group, 0) for each in (key, value))
    if sinks is None:
        attended = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
    else:
        attended = attend_with_sinks(query, keys, values, mask, scale, sinks)
    out.copy_(attended.transpose(0, 1))


def attend_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """Attend with a sink score per head, which takes its share: weights sum to less than 1.

    queries  [..., heads, T, D]; keys and values [..., heads, N, D], or one head for all
    visible  [..., T, N] bool, KV that each row sees; sinks: [heads]
    """
    scores = torch.matmul(queries, keys.mT) * scale
    scores = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    sink_scores = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, sink_scores], dim=-1)
    # Subtract the largest, as in transformers: 16 bits round the difference.
    scores -= scores.amax(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1)[..., :-1]
    return torch.matmul(weights, values)


def _visible(rows: int, start: int, window: int, parents: Tensor | None) -> Tensor:
    """[T, end] bool, the KV that each row sees: a chain, or the last rows of a tree."""
    if parents is None:
        parents = torch.arange(-1, rows - 1)
    depths, above = _tree(parents.tolist())
    root = start + rows - len(depths)
    positions = torch.cat([torch.arange(root), root + depths])
    past = torch.ones(rows, root, dtype=torch.bool)
    return torch.cat([past, above[-rows:]], dim=1) & (positions > positions[start:, None] - window)


def _tree(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Depths [N] of a tree's nodes, and [N, N] whether a node is another one or below it."""
    depths = torch.zeros(len(parents), dtype=torch.int64)
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
        above[node] |= above[parent]
    return depths, above


def _norm(rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return rows
    parts = rows.reshape(-1, len(weight))
    normed = torch.empty_like(parts)
    rms_norm_out(parts, None, weight, eps, None, normed)
    return normed.view_as(rows)


def _rotate(rows: Tensor, width: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to [T, heads * D]: [heads, T, D]."""
    heads = rows.view(len(rows), -1, width).transpose(0, 1)
    turning, rest = heads[..., : cos.shape[1]], heads[..., cos.shape[1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def _rotate_columns(columns: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary embeddings to columns [..., T, R], as `latent_attention_out` has them."""
    if interleaved and 2 * cos.shape[1] == columns.shape[-1]:
        numbers = torch.view_as_complex(columns.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * torch.complex(cos, sin)).flatten(-2).to(columns.dtype)
    if interleaved:
        columns = torch.cat((columns[..., 0::2], columns[..., 1::2]), dim=-1)
    first, second = columns.chunk(2, dim=-1)
    return columns * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_out(rows: Tensor, width: int, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Apply rotary embeddings to heads of `width` columns of rows [T, heads * D], in place.

    cos, sin     [T, R], of the first R columns of a head; or, interleaved, float32 [T, R / 2]
    interleaved  neighbours are rotated as complex numbers, rounded once; else each column with the
                 one R / 2 columns on, rounded after each operation
    """
    rotary = 2 * cos.shape[1] if interleaved else cos.shape[1]
    heads = rows.view(len(rows), -1, width).transpose(0, 1)
    turned = _rotate_columns(heads[..., :rotary].clone(), cos, sin, interleaved)
    heads[..., :rotary] = turned


def route_out(
    logits: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
    sigmoid: bool,
    rounded: bool,
    divided: bool,
    groups: int,
    kept_groups: int,
    group_best: int,
    added: float,
    scale: float,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> None:
    """Write the experts that a router chooses by rows of logits [T, E]: weights [T, K] and int64
    ids [T, K].

    bias     [E] float32 or None: added to the scores to choose by, and not to the weights
    factors  [E] float32 or None: factor of each expert's weight
    sigmoid  scores are sigmoids of logits; else their softmax
    rounded  scores and weights are rounded to the dtype of logits after each operation; else they
             are float32
    divided  weights are divided by their sum and `added`
    groups   equal parts of the experts; only those of `kept_groups` are chosen from, whose
             `group_best` best experts have the largest sum
    scale    factor of all weights
    """
    scores = logits.float().sigmoid() if sigmoid else torch.softmax(logits, -1, torch.float32)
    if rounded:
        scores = scores.to(logits.dtype)
    choices = scores if bias is None else scores + bias
    if groups > 1:
        parts = choices.unflatten(-1, (groups, -1))
        sums = parts.topk(group_best, -1).values.sum(-1)
        best = sums.topk(kept_groups, -1).indices
        left = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
        left = left.repeat_interleave(parts.shape[-1], -1)
        choices = choices.masked_fill(left, float("-inf") if sigmoid else 0.0)
        scores = scores if sigmoid else scores.masked_fill(left, 0.0)
    ids = torch.topk(choices, topk_ids.shape[1], dim=-1).indices
    weights = scores.gather(1, ids)
    if divided:
        weights = weights / (weights.sum(-1, keepdim=True) + added)
    weights = weights * scale
    topk_weights.copy_(weights if factors is None else weights * factors[ids])
    topk_ids.copy_(ids)


def mix_streams_out(normed: Tensor, gates: Tensor, out: Tensor) -> None:
    """Write the mean of a token's N rows, each times the sigmoid of its gates, to out [T, H].

    normed, gates  [T, N * H]
    """
    streams = normed.shape[1] // out.shape[1]
    out.copy_((gates.sigmoid() * normed).unflatten(1, (streams, -1)).mean(1))


def add_streams_out(hidden: Tensor, update: Tensor, gates: Tensor, out: Tensor) -> None:
    """Add an update [T, H] to each of a token's N rows by a weight of its own: to out [T, N * H].

    hidden  [T, N * H]
    gates   [T, N]: weights are twice the sigmoids of their Nth parts
    """
    weights = 2 * torch.sigmoid(gates / gates.shape[1])
    out.copy_(hidden + (update[:, None] * weights[:, :, None]).flatten(1))


def combine_out(outputs: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    out.copy_(reference.combine(outputs, topk_weights, out.dtype))
