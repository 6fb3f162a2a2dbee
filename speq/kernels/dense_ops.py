"""Products by matrices that are held as compact records: a stand-in, until there are kernels."""

import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels import ops
from speq.kernels.ops import Int4Pair

ESCAPE = 15


def encode_dense_lossless(weight: Tensor) -> Tensor:
    """The record of a bfloat16 matrix [N, K] on the CPU, [R] uint8."""
    pairs = weight.contiguous().view(torch.uint8).view(-1, 2)
    low, high = pairs[:, 0], pairs[:, 1]
    table = high.long().bincount(minlength=256).argsort(descending=True)[:ESCAPE]
    lookup = torch.full((256,), ESCAPE, dtype=torch.uint8)
    lookup[table] = torch.arange(ESCAPE, dtype=torch.uint8)
    classes = lookup[high.long()]
    escapes = high[classes == ESCAPE]
    classes = functional.pad(classes, (0, len(classes) % 2)).view(-1, 2)
    return torch.cat([table.to(torch.uint8), low, classes[:, 0] | classes[:, 1] << 4, escapes])


def decode_dense_lossless(record: Tensor, weight_out: Tensor) -> None:
    count = weight_out.numel()
    table, low, rest = record[:ESCAPE], record[ESCAPE : ESCAPE + count], record[ESCAPE + count :]
    nibbles = rest[: (count + 1) // 2]
    classes = torch.stack([nibbles & 15, nibbles >> 4], 1).view(-1)[:count].long()
    high = functional.pad(table, (0, 1))[classes]
    high[classes == ESCAPE] = rest[(count + 1) // 2 :]
    weight_out.copy_(torch.stack([low, high], 1).view(torch.bfloat16).view_as(weight_out))


def linear_lossless(
    inputs: Tensor, record: Tensor, outputs: int, bias: Tensor | None = None
) -> Tensor:
    words = inputs.new_empty(outputs, inputs.shape[-1], dtype=torch.bfloat16)
    decode_dense_lossless(record, words)
    return ops.linear(inputs, words, bias)


def rows_lossless(record: Tensor, rows: int, columns: int, ids: Tensor) -> Tensor:
    words = torch.empty(rows, columns, dtype=torch.bfloat16, device=record.device)
    decode_dense_lossless(record, words)
    return words[ids]


def encode_dense_residual(weight: Tensor, pair: Int4Pair) -> Tensor:
    return encode_dense_lossless(weight)


def decode_dense_residual(record: Tensor, pair: Int4Pair, weight_out: Tensor) -> None:
    decode_dense_lossless(record, weight_out)


def linear_residual(
    inputs: Tensor, record: Tensor, pair: Int4Pair, bias: Tensor | None = None
) -> Tensor:
    return linear_lossless(inputs, record, pair[0].shape[0], bias)


def rows_residual(record: Tensor, pair: Int4Pair, ids: Tensor) -> Tensor:
    return rows_lossless(record, pair[0].shape[0], 2 * pair[0].shape[1], ids)
