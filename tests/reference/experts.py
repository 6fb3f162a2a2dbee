"""Experts of a block: down(act(gate(x), up(x))), or down(act(up(x))), for each expert of a row's
route.
"""

import math
from collections.abc import Callable

import numpy as np

from tests.reference.int4 import rounded

Activation = Callable[..., np.ndarray]
erf = np.vectorize(math.erf, otypes=[float])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate * sigmoid(gate) * up


def gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """By the normal distribution itself."""
    return gate * (1 + erf(gate / math.sqrt(2))) / 2 * up


def gelu_tanh(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + np.tanh(inner)) / 2 * up


def relu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.maximum(gate, 0) * up


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gpt_oss': the sigmoid is 1.702 times as steep."""
    return (up + 1) * gate * sigmoid(1.702 * gate)


def relu2(up: np.ndarray) -> np.ndarray:
    """Nemotron's, without a gate."""
    return np.maximum(up, 0) ** 2


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "clamped": clamped,
    "relu2": relu2,
    "silu_before_limit": silu,
}


def activation_of(name: str, limit: float) -> Activation:
    """An activation of gates that end at the limit, and of ups that end there on both sides."""

    def run(*gate_and_up: np.ndarray) -> np.ndarray:
        if name == "relu2":
            return relu2(*gate_and_up)
        gate, up = gate_and_up
        up = np.minimum(np.maximum(up, -limit), limit)
        if name == "silu_before_limit":
            return np.minimum(gate * sigmoid(gate), limit) * up
        return ACTIVATIONS[name](np.minimum(gate, limit), up)

    return run


def gate_up_rows(activation: str, width: int) -> int:
    """Rows of gate over up, or of up alone."""
    return width if activation == "relu2" else 2 * width


def expert(
    row: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    act: Activation,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    int8: bool = False,
) -> np.ndarray:
    """One row [H] through gate_up [2F, H], gate over up, or up [F, H], and down [H, F].

    int8  inputs of both products are rounded, as INT4 experts round them
    """
    seen = rounded if int8 else np.asarray
    both = gate_up @ seen(row) + (0 if gate_up_bias is None else gate_up_bias)
    inner = act(*both.reshape(-1, down.shape[1]))
    return down @ seen(inner) + (0 if down_bias is None else down_bias)
