"""GPTQ (Frantar et al., arXiv:2210.17323): quantization of a matrix to symmetric INT4, column by
column.

The error of rounding a column is compensated by the columns after it. The Hessian of the inputs
tells how well one column can compensate for another.

Shape letters: N outputs, K inputs, G groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.errors import present
from speq.kernels.ops import quantize_int4
from speq.kernels.windows import SIGN, WINDOW, window_starts, words_of

ZERO_POINT = 8
MAX_CODE = 7
# Shares of a group's largest magnitude that are tried for its scale, and the power of errors that
# are summed to compare them. Powers from 2 to 3 differ little; together they reduced the outputs'
# error on held-out text of the bundled model from 0.047 to 0.043.
CLIPPINGS = tuple(1 - 0.04 * step for step in range(9))
ERROR_POWER = 2.4
# Columns whose updates are applied to the rest of the matrix in one product.
BLOCK_COLUMNS = 128
# Factor by which damping grows if the Hessian has no Cholesky factor in float32.
MORE_DAMPING = 10.0
LEAST_DAMPING = 1e-4


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A quantised matrix [N, K] in the layout of a GPTQ checkpoint, inputs first.

    codes   [K, N] uint8, from 0 to 15, 8 being zero
    scales  [G, N] float16
    groups  [K] int32: the group of each input
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor

    def dequantise(self) -> Tensor:
        """Dequantise the matrix [N, K] to float32, as any reader does."""
        values = self.codes.float() - ZERO_POINT
        return (values * self.scales.float()[self.groups.long()]).t().contiguous()


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """Factor of a Hessian [K, K] for GPTQ, with inputs in the order of quantization.

    upper  [K, K] float32, upper triangular: upper' upper is the inverse of the damped Hessian
    order  [K] int64
    damp   share of the mean of the diagonal that was added to it
    """

    upper: Tensor
    order: Tensor
    damp: float


def factor_inverse(hessian: Tensor, damp: float, by_activation: bool) -> InverseFactor:
    """Factor the inverse of a Hessian [K, K] float32, which must be finite.

    damp           share of the mean of the diagonal to add to it; more is used if that is too
                   little for float32
    by_activation  take the inputs with the largest diagonal first; otherwise in their own order

    An input that never occurred gets the mean: it is rounded, and does not affect the others.
    """
    size = hessian.shape[0]
    order = torch.arange(size)
    if by_activation:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    # With the inputs reversed, the inverse of the lower factor is the upper one wanted.
    backwards = order.flip(0)
    damped = hessian[backwards[:, None], backwards]
    diagonal = damped.diagonal()
    seen = diagonal > 0
    mean = float(diagonal[seen].double().mean()) if bool(seen.any()) else 1.0
    plain = diagonal.where(seen, mean)
    while True:
        diagonal.copy_(plain + damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed and bool(torch.isfinite(lower.diagonal()).all()):
            break
        damp = max(damp, LEAST_DAMPING) * MORE_DAMPING
    del damped, diagonal
    upper = torch.eye(size, dtype=hessian.dtype)
    torch.linalg.solve_triangular(lower.flip(0, 1), upper, upper=True, out=upper)
    return InverseFactor(upper, order, damp)


def quantise(
    matrix: Tensor,
    factor: InverseFactor,
    group_size: int,
    static_groups: bool,
    decodable: bool = False,
) -> QuantisedMatrix:
    """Quantise a matrix [N, K] float32; group_size divides K.

    A scale is rounded to float16 before any code is chosen. It is chosen when its group's first
    column is reached, from weights that compensate for the columns before; groups are consecutive
    columns in the factor's order.

    static_groups  choose all scales first; groups are neighbours in the matrix, whatever the order
    decodable      use only codes allowed by `nearest_decodable`; the matrix must hold BF16 words
    """
    order = factor.order
    weights = matrix.t()[order]  # [K, N], so that a column is contiguous
    inputs, outputs = weights.shape
    groups = (order if static_groups else torch.arange(inputs)) // group_size
    scales = torch.zeros(inputs // group_size, outputs, dtype=torch.float16)
    if static_groups:
        for group, members in enumerate(matrix.split(group_size, dim=1)):
            scales[group] = scale_of(members.t())
    group_of = groups.tolist()
    codes = torch.empty(inputs, outputs, dtype=torch.uint8)
    errors = torch.empty(BLOCK_COLUMNS, outputs)
    for begin, end in blocks(inputs, group_size):
        for at in range(begin, end):
            if not static_groups and at % group_size == 0:
                scales[group_of[at]] = scale_of(weights[at : at + group_size])
            scale = scales[group_of[at]].float()
            values = code_values(weights[at], scale)
            if decodable:
                values = nearest_decodable(values, matrix[:, order[at]], scales[group_of[at]])
            codes[at] = values + ZERO_POINT
            error = errors[at - begin]
            torch.sub(weights[at], values.mul_(scale), out=error)
            error /= factor.upper[at, at]
            weights[at + 1 : end].addr_(factor.upper[at, at + 1 : end], error, alpha=-1)
        weights[end:].addmm_(factor.upper[begin:end, end:].t(), errors[: end - begin], alpha=-1)
    codes[order] = codes.clone()
    groups[order] = groups.clone()
    return QuantisedMatrix(codes, scales, groups.to(torch.int32))


def blocks(inputs: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Split columns into blocks such that a group has all updates before its scale is chosen."""
    step = max(BLOCK_COLUMNS // group_size, 1) * group_size
    for start in range(0, inputs, step):
        stop = min(start + step, inputs)
        for begin in range(start, stop, BLOCK_COLUMNS):
            yield begin, min(begin + BLOCK_COLUMNS, stop)


def code_values(weights: Tensor, scale: Tensor) -> Tensor:
    """Nearest codes, from -8 to 7, as float32; zero where the scale is zero."""
    divisor = scale.where(scale > 0, torch.inf)
    return (weights / divisor).round_().clamp_(-ZERO_POINT, MAX_CODE)


def nearest_decodable(values: Tensor, exact: Tensor, scales: Tensor) -> Tensor:
    """Codes nearest to `values` from which the exact weight's word can be decoded.

    values  [N] float32, nearest of all codes; exact: [N] float32, BF16 words; scales: [N] float16,
            not negative

    Windows of larger codes begin and end later, so those that contain a word are neighbours, and
    clamping chooses the nearest. Code 0 is used for a word below all windows, and for one in the
    window of 1 whose class determines it: an escape gains too little. A word beyond all windows
    gets the outermost code and is an exception; a scale chosen from exact weights leaves no such
    word, if float16 holds it well.
    """
    words = words_of(exact)
    magnitudes, negative = words & ~SIGN, words >= SIGN
    starts = window_starts(torch.arange(ZERO_POINT + 1)[:, None], scales)
    ends = starts + WINDOW
    # Classes of 0 end with the last word that has the high byte of its start.
    ends[0] = (starts[0] | WINDOW - 1).add_(1).minimum(ends[1])
    highest = (magnitudes >= starts[1:]).sum(0).minimum(MAX_CODE + negative.long())
    highest = highest.where(scales > 0, 0)
    lowest = (magnitudes >= ends).sum(0)
    signs = 1 - 2 * negative.long()
    # Below all windows, and beyond them, the bounds have crossed: clamp gives the upper one.
    return (values * signs).clamp(lowest, highest) * signs


def scale_of(weights: Tensor) -> Tensor:
    """Choose scales [N] float16 of a group's weights [group_size, N].

    Each output takes the scale with the least rounding error among CLIPPINGS times its largest
    magnitude: few magnitudes are that large, and their scale is coarse for all others.
    """
    largest = weights.abs().amax(0) / MAX_CODE
    limit = torch.finfo(torch.float16).max
    best = least = None
    for clipping in CLIPPINGS:
        scale = (largest * clipping).clamp(max=limit).to(torch.float16)
        steps = scale.float()
        error = code_values(weights, steps).mul_(steps).sub_(weights).abs_()
        total = error.pow_(ERROR_POWER).sum(0)
        if best is None or least is None:
            best, least = scale, total
        else:
            best = torch.where(total < least, scale, best)
            least = torch.minimum(total, least)
    return present(best, "no scale was tried")


def round_to_nearest(matrix: Tensor, group_size: int) -> QuantisedMatrix:
    """Round a matrix [N, K] to nearest, exactly as in a draft made without calibration."""
    packed, scales = quantize_int4(matrix, group_size)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1).t().contiguous()
    groups = torch.arange(matrix.shape[1], dtype=torch.int32) // group_size
    return QuantisedMatrix(codes, scales.t().contiguous(), groups)
