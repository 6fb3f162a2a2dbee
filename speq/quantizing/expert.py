"""Quantization of one expert by the Hessians of its inputs.

Shape letters: H hidden, F expert width, T tokens, N outputs of a matrix, K inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speq.errors import CheckpointError
from speq.experts.int4 import group_columns
from speq.kernels.ops import Activation, activate
from speq.quantizing.activations import ActivationRows
from speq.quantizing.gptq import QuantisedMatrix, factor_inverse, quantise, round_to_nearest
from speq.quantizing.settings import QuantizeSettings

# Rows run through an expert at a time. Fixed, because results must not depend on a budget.
EXPERT_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ExpertConstants:
    """Parts of an expert besides its matrices, which are not quantised.

    gate_up_bias, down_bias  [2F] and [H] float32, or 0.0 if it has none
    """

    activation: Activation
    gate_up_bias: Tensor | float = 0.0
    down_bias: Tensor | float = 0.0


@dataclass(frozen=True, slots=True)
class FloatExpert:
    """An expert in float32: gate_up_proj [2F, H], gate over up, and down_proj [H, F]."""

    gate_up_proj: Tensor
    down_proj: Tensor
    between: ExpertConstants

    def inner(self, inputs: Tensor) -> Tensor:
        """Compute the input of down_proj: [T, H] to [T, F]."""
        gate_up = inputs @ self.gate_up_proj.t() + self.between.gate_up_bias
        return activate(self.between.activation, gate_up)

    def outer(self, inner: Tensor) -> Tensor:
        """Apply down_proj: [T, F] to [T, H]."""
        return inner @ self.down_proj.t() + self.between.down_bias

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run rows [T, H] to [T, H], without the route's weights."""
        return self.outer(self.inner(inputs))


@dataclass(frozen=True, slots=True)
class QuantisedExpert:
    """Quantised matrices of an expert; gate and up share their inputs, and so their groups.

    method  "gptq" or "rtn"
    damp    the largest share of a Hessian's diagonal that was added to it; 0 for "rtn"
    """

    gate_up: QuantisedMatrix
    down: QuantisedMatrix
    method: str
    damp: float

    def dequantise(self, between: ExpertConstants) -> FloatExpert:
        return FloatExpert(self.gate_up.dequantise(), self.down.dequantise(), between)


@dataclass(slots=True)
class Hessians:
    """Hessians X'X of the inputs X of gate and up [H, H] and of down [F, F], in float32; `tokens`
    rows.

    GPTQ's H is twice that, which changes nothing.
    """

    gate_up: Tensor
    down: Tensor
    tokens: int = 0

    def add(self, inputs: Tensor, inner: Tensor) -> None:
        self.gate_up.addmm_(inputs.t(), inputs)
        self.down.addmm_(inner.t(), inner)
        self.tokens += len(inputs)

    @classmethod
    def empty(cls, expert: FloatExpert) -> "Hessians":
        hidden, width = expert.down_proj.shape
        return cls(torch.zeros(hidden, hidden), torch.zeros(width, width))


def run(
    expert: FloatExpert,
    inputs: ActivationRows,
    rows: Tensor,
    weights: Tensor,
    outputs: ActivationRows,
    hessians: Hessians | None = None,
) -> None:
    """Add an expert's weighted outputs to those of its rows, and sum its Hessians.

    rows     [T] int64, ascending; weights [T] float32
    """
    for block, shares in zip(rows.split(EXPERT_ROWS), weights.split(EXPERT_ROWS), strict=True):
        given = inputs.gather(block).float()
        inner = expert.inner(given)
        if hessians is not None:
            hessians.add(given, inner)
        outputs.add(block, expert.outer(inner) * shares[:, None])


def quantise_expert(
    expert: FloatExpert, hessians: Hessians, settings: QuantizeSettings, where: str
) -> QuantisedExpert:
    """Quantise an expert by GPTQ, or round it if that is requested or it has too few tokens.

    Raises SpeqError if weights or activations are not finite.
    """
    for values in (expert.gate_up_proj, expert.down_proj, hessians.gate_up, hessians.down):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{where} holds or makes values that are not finite; is the checkpoint whole, and "
                "does it run in its own dtype?"
            )
    most_inputs = max(expert.gate_up_proj.shape[1], expert.down_proj.shape[1])
    if settings.method == "rtn" or hessians.tokens < settings.min_tokens(most_inputs):
        return round_expert(expert, settings)
    tokens = hessians.tokens
    gate_up, damp = quantise_matrix(expert.gate_up_proj, hessians.gate_up, tokens, settings)
    down, down_damp = quantise_matrix(expert.down_proj, hessians.down, tokens, settings)
    return QuantisedExpert(gate_up, down, "gptq", max(damp, down_damp))


def quantise_matrix(
    matrix: Tensor, hessian: Tensor, tokens: int, settings: QuantizeSettings
) -> tuple[QuantisedMatrix, float]:
    """Quantise a matrix [N, K] float32 by GPTQ. Return it and the damping, a share of the Hessian's
    diagonal.

    hessian  [K, K] of `tokens` rows
    """
    inputs = matrix.shape[1]
    damp = settings.damp_for(tokens, inputs)
    factor = factor_inverse(hessian, damp, settings.column_order != "given")
    group_size = group_columns(settings.group_size, inputs)
    static, decodable = settings.column_order == "static", settings.codes == "decodable"
    return quantise(matrix, factor, group_size, static, decodable), factor.damp


def round_matrix(matrix: Tensor, settings: QuantizeSettings) -> QuantisedMatrix:
    return round_to_nearest(matrix, group_columns(settings.group_size, matrix.shape[1]))


def round_expert(expert: FloatExpert, settings: QuantizeSettings) -> QuantisedExpert:
    gate_up, down = expert.gate_up_proj, expert.down_proj
    return QuantisedExpert(
        round_matrix(gate_up, settings), round_matrix(down, settings), "rtn", 0.0
    )
