"""GPTQ against the textbook: the paper's equations, one column at a time, in double precision."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speq.kernels.ops import quantize_int4
from speq.kernels.windows import escapes, words_of
from speq.quantizing.gptq import (
    QuantisedMatrix,
    blocks,
    factor_inverse,
    quantise,
    round_to_nearest,
    scale_of,
)
from tests.reference.windows import codes_left

INPUTS = 256
GROUP_SIZES = (32, 64, 128, INPUTS)


@dataclass(frozen=True)
class Problem:
    """A least-squares problem: inputs [T, K], the matrix [N, K], in float64."""

    inputs: Tensor
    matrix: Tensor

    @property
    def hessian(self) -> Tensor:
        return self.inputs.T @ self.inputs

    def error(self, matrix: Tensor) -> float:
        """Squared error of the outputs."""
        return float((self.inputs @ (matrix.double() - self.matrix).T).square().sum())


def problem(outputs: int = 24, tokens: int = 600, seed: int = 0) -> Problem:
    """Inputs that are correlated and of very different sizes, as those of a network are."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randn(tokens, 40, generator=generator, dtype=torch.float64)
    mixing = torch.randn(40, INPUTS, generator=generator, dtype=torch.float64)
    noise = torch.randn(tokens, INPUTS, generator=generator, dtype=torch.float64)
    sizes = torch.randn(INPUTS, generator=generator, dtype=torch.float64).exp()
    inputs = (sources @ mixing / 6 + 0.3 * noise) * sizes
    matrix = torch.randn(outputs, INPUTS, generator=generator, dtype=torch.float64)
    return Problem(inputs.float().double(), matrix.float().double())


def textbook_scale(weights: list[float]) -> float:
    """The best of nine scales for some weights, as a float16 holds it."""
    best, least = 0.0, float("inf")
    for step in range(9):
        clipped = max(abs(w) for w in weights) / 7 * (1 - 0.04 * step)
        scale = float(torch.tensor(clipped, dtype=torch.float64).half())
        total = 0.0
        for weight in weights:
            code = max(-8, min(7, round(weight / scale)))
            total += abs(weight - code * scale) ** 2.4
        if total < least:
            best, least = scale, total
    return best


def nearest(values: Tensor, exact: Tensor, scales: Tensor, decodable: bool) -> Tensor:
    """The code of each output of a column: of all, or of those that tell its exact word."""
    if not decodable:
        return values.round().clamp(-8, 7)
    words = words_of(exact.float()).tolist()
    codes = []
    for word, scale, value in zip(words, scales.tolist(), values.tolist(), strict=True):
        left = torch.tensor(codes_left(word, scale), dtype=torch.float64)
        codes.append(left[(left - value).abs().argmin()])
    return torch.stack(codes)


def textbook(
    case: Problem, damp: float, order: str, group_size: int, decodable: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Frantar et al., Eqs. 2 and 3: the inverse of what is left of the Hessian is kept by Gaussian
    elimination, and every column's error goes to all that are left at once.

    Returns codes [N, K], scales [N, G] and the group of each input.
    """
    hessian = case.hessian
    size = hessian.shape[0]
    hessian = hessian + damp * hessian.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    columns = list(range(size))
    if order != "given":
        columns.sort(key=lambda k: -float(case.hessian[k, k]))
    weights = case.matrix.clone()
    codes = torch.zeros(weights.shape, dtype=torch.int64)
    scales = torch.zeros(len(weights), size // group_size, dtype=torch.float64)
    groups = torch.zeros(size, dtype=torch.int64)
    for place, column in enumerate(columns):
        group = (column if order == "static" else place) // group_size
        groups[column] = group
        if order != "static" and place % group_size == 0:
            members = columns[place : place + group_size]
            for row in range(len(weights)):
                scales[row, group] = textbook_scale(weights[row, members].tolist())
        if order == "static" and place == 0:
            for g in range(size // group_size):
                for row in range(len(weights)):
                    members = list(range(g * group_size, (g + 1) * group_size))
                    scales[row, g] = textbook_scale(case.matrix[row, members].tolist())
        values = weights[:, column] / scales[:, group]
        code = nearest(values, case.matrix[:, column], scales[:, group], decodable)
        codes[:, column] = code.long()
        error = (weights[:, column] - code * scales[:, group]) / inverse[column, column]
        left = torch.tensor(columns[place + 1 :], dtype=torch.int64)
        weights[:, left] -= error[:, None] * inverse[column, left]
        pivot = inverse[column, left] / inverse[column, column]
        inverse[left[:, None], left] -= pivot[:, None] * inverse[column, left]
    return codes, scales, groups


def gptq(
    case: Problem, damp: float, order: str, group_size: int, decodable: bool = False
) -> QuantisedMatrix:
    factor = factor_inverse(case.hessian.float(), damp, order != "given")
    assert factor.damp == damp
    return quantise(case.matrix.float(), factor, group_size, order == "static", decodable)


@pytest.mark.parametrize("order", ["given", "activation", "static"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_equals_the_textbook(order: str, group_size: int) -> None:
    """A code may differ where float32 turns a tie between two; the problem's solution may not."""
    case = problem(outputs=8)
    codes, scales, groups = textbook(case, 0.01, order, group_size)
    found = gptq(case, 0.01, order, group_size)
    assert torch.equal(found.groups.long(), groups)
    ours = found.codes.t().long() - 8
    first = groups == 0 if order != "static" else groups >= 0
    # What is chosen before any error has been moved must be equal to the bit.
    assert torch.equal(found.scales.t()[:, :1].double(), scales[:, :1])
    assert (ours[:, first] == codes[:, first]).double().mean() > 0.99
    assert (ours == codes).double().mean() > 0.9
    expected = scales[:, groups] * codes
    assert case.error(found.dequantise()) == pytest.approx(case.error(expected), rel=0.02)


def exceptions(case: Problem, found: QuantisedMatrix) -> int:
    """Weights whose code is not 0 and does not tell the exact word."""
    codes = found.codes.t().to(torch.int32) - 8
    scales = found.scales[found.groups.long()].t()
    untold = escapes(words_of(case.matrix.float()), codes, scales)
    return int((untold & (codes != 0)).sum())


@pytest.mark.parametrize("order", ["given", "activation", "static"])
def test_codes_that_tell_the_exact_word(order: str) -> None:
    """As the textbook's, at a small part of rounding's error. Static groups, whose scales are of
    exact weights, leave no exceptions."""
    case = problem(outputs=8)
    case = Problem(case.inputs, case.matrix.bfloat16().double())
    codes, scales, groups = textbook(case, 0.01, order, 64, decodable=True)
    found = gptq(case, 0.01, order, 64, decodable=True)
    assert (found.codes.t().long() - 8 == codes).double().mean() > 0.9
    expected = scales[:, groups] * codes
    assert case.error(found.dequantise()) == pytest.approx(case.error(expected), rel=0.02)
    free = gptq(case, 0.01, order, 64)
    assert exceptions(case, free) > 0.01 * codes.numel()
    assert exceptions(case, found) <= (0 if order == "static" else exceptions(case, free) // 10)
    plain = case.error(round_to_nearest(case.matrix.float(), 64).dequantise())
    price = case.error(found.dequantise()) - case.error(free.dequantise())
    assert price < 0.1 * plain


@pytest.mark.parametrize("order", ["given", "activation", "static"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_beats_rounding(order: str, group_size: int) -> None:
    case = problem()
    plain = case.error(round_to_nearest(case.matrix.float(), group_size).dequantise())
    found = case.error(gptq(case, 0.01, order, group_size).dequantise())
    assert 0 < found < 0.5 * plain


def test_order_by_activation_helps() -> None:
    case = problem()
    errors = {
        order: case.error(gptq(case, 0.01, order, 64).dequantise())
        for order in ("given", "activation", "static")
    }
    assert errors["activation"] < errors["given"]
    assert errors["static"] < errors["given"]


@pytest.mark.parametrize("group_size", [2, 16, 128])
def test_rounding_is_the_draft_made_without_calibration(group_size: int) -> None:
    matrix = problem().matrix.float()
    packed, scales = quantize_int4(matrix, group_size)
    found = round_to_nearest(matrix, group_size)
    assert torch.equal(found.scales, scales.t())
    for column in range(INPUTS):
        nibbles = packed[:, column // 2] >> 4 * (column % 2) & 0xF
        assert torch.equal(found.codes[column], nibbles)
    assert found.groups.tolist() == [column // group_size for column in range(INPUTS)]


def test_dequantised_by_hand() -> None:
    codes = torch.tensor([[0, 15], [8, 9], [7, 1]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=torch.float16)
    matrix = QuantisedMatrix(codes, scales, torch.tensor([1, 0, 1], dtype=torch.int32))
    expected = [[-8 * 1.0, 0.0, -1.0], [7 * 0.25, 2.0, -7 * 0.25]]
    assert matrix.dequantise().tolist() == expected


def test_the_factor_is_of_the_damped_inverse() -> None:
    case = problem()
    hessian = case.hessian.float()
    for by_activation in (False, True):
        factor = factor_inverse(hessian.clone(), 0.05, by_activation)
        assert factor.upper.triu().equal(factor.upper)
        damped = hessian.double() + 0.05 * hessian.double().diagonal().mean() * torch.eye(INPUTS)
        inverse = torch.linalg.inv(damped)[factor.order][:, factor.order]
        torch.testing.assert_close(
            (factor.upper.T @ factor.upper).double(), inverse, rtol=1e-3, atol=1e-8
        )
        descending = sorted(range(INPUTS), key=lambda k: -float(hessian[k, k]))
        assert factor.order.tolist() == (descending if by_activation else list(range(INPUTS)))
    assert hessian.equal(case.hessian.float())


def test_more_damping_where_float32_has_no_factor() -> None:
    """Of rank 3, with eigenvalues that float32 cannot tell from negative ones."""
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 1e3
    hessian = inputs.T @ inputs
    assert torch.linalg.cholesky_ex(hessian).info > 0
    factor = factor_inverse(hessian, 1e-9, False)
    assert factor.damp > 1e-9
    assert torch.isfinite(factor.upper).all()
    matrix = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    found = quantise(matrix, factor, 32, False).dequantise()
    plain = round_to_nearest(matrix, 32).dequantise()
    error, plain_error = ((inputs @ (each - matrix).T).square().sum() for each in (found, plain))
    assert error < plain_error


def test_inputs_that_were_never_seen() -> None:
    """They are rounded as well as they can be, and what is known of the others stays."""
    case = problem()
    dead = torch.zeros(INPUTS, dtype=torch.bool)
    dead[[3, 64, 65, 255]] = True
    inputs = case.inputs.clone()
    inputs[:, dead] = 0
    dull = Problem(inputs, case.matrix)
    for order in ("given", "activation", "static"):
        found = gptq(dull, 0.01, order, 64)
        weights = found.dequantise()
        step = found.scales.float()[found.groups.long()].t()
        inside = (weights - case.matrix.float()).abs() <= step / 2 * 1.001
        clipped = (found.codes.t() == 0) | (found.codes.t() == 15)
        assert (inside | clipped)[:, dead].all()
        plain = dull.error(round_to_nearest(case.matrix.float(), 64).dequantise())
        assert dull.error(weights) < 0.5 * plain


def test_nothing_seen_at_all_is_rounding_with_the_same_scales() -> None:
    matrix = problem().matrix.float()
    factor = factor_inverse(torch.zeros(INPUTS, INPUTS), 0.01, True)
    found = quantise(matrix, factor, 64, True)
    step = found.scales.float()[found.groups.long()].t()
    expected = (matrix / step).round().clamp(-8, 7) * step
    assert torch.equal(found.dequantise(), expected)


def test_zero_weights_and_scales_beyond_float16() -> None:
    matrix = torch.zeros(3, 64)
    matrix[1] = 1e7
    matrix[2] = 1e-9
    factor = factor_inverse(torch.eye(64), 0.01, False)
    for static in (False, True):
        found = quantise(matrix, factor, 32, static).dequantise()
        assert (found[0] == 0).all()
        assert (found[1] == 7 * torch.finfo(torch.float16).max).all()
        assert found[2].abs().max() < 1e-7
        assert torch.isfinite(found).all()


def test_scales_are_float16_before_codes_are_chosen() -> None:
    weights = problem().matrix.float()[:, :32].t()
    expected = [textbook_scale(column.tolist()) for column in weights.t().double()]
    found = scale_of(weights)
    assert found.dtype == torch.float16
    assert found.tolist() == expected


@pytest.mark.parametrize("group_size", [16, 48, 80, 128, 192, 256, 384])
def test_no_group_is_cut_by_a_block_it_did_not_begin(group_size: int) -> None:
    """A group's scale is chosen once every earlier column's error has reached all of it."""
    inputs = 2 * 384 * 5
    runs = list(blocks(inputs, group_size))
    assert [begin for begin, _ in runs[1:]] == [end for _, end in runs[:-1]]
    assert (runs[0][0], runs[-1][1]) == (0, inputs)
    for begin, end in runs:
        assert 0 < end - begin <= 128
        for start in range(0, inputs, group_size):
            if begin < start < end:
                assert start + group_size <= end
