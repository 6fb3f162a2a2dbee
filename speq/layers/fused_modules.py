"""Fused modules: norms and routers, one call per module for a few rows.

Each class replaces the `forward` of a module of transformers and uses its weights and parts. Other
inputs go to the module's own forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from speq.errors import present
from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import RMSNorm, RouterRule
from speq.kernels.ops import MAX_LINEAR_ROWS, linear
from speq.layers.gates import RouterGate, ScoreGate

# Classes of transformers with the usual forward, which is reimplemented here.
NORMS = frozenset(
    f"{family}RMSNorm"
    for family in (
        *("Qwen2Moe", "Qwen3Moe", "Olmoe", "Mixtral", "DeepseekV2", "DeepseekV3"),
        *("Glm4Moe", "Glm4MoeLite", "MiniMaxM2", "Dots1", "SolarOpen"),
        *("Ernie4_5_Moe", "HunYuanMoEV1", "Lfm2Moe", "Mellum", "HYV3"),
        *("ExaoneMoe", "Laguna", "Afmoe", "GraniteMoe", "GraniteMoeHybrid"),
        *("KimiLinear", "BailingHybrid", "Mistral4", "MiMoV2Flash", "DeepseekV32", "GlmMoeDsa"),
        "Glm5NextText",
    )
)
# Norms whose rows are rounded once, at the end, and what is added to their weights.
NORMS_ROUNDED_ONCE = {
    "GptOssRMSNorm": 0.0,
    "Qwen3NextRMSNorm": 1.0,
    "Qwen3_5MoeRMSNorm": 1.0,
    "Gemma4RMSNorm": 0.0,
    "MiniMaxM3VLRMSNorm": 1.0,
    "Qwen4ExpTextRMSNorm": 1.0,
    "NemotronHRMSNorm": 0.0,
    "FlexOlmoRMSNorm": 0.0,
    "Step3p7RMSNorm": 1.0,
    "DeepseekV4RMSNorm": 0.0,
}
# Routers by the rule of their gate: dtype of their logits and of their weights; None: of the rows.
ROUTERS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    **dict.fromkeys(
        (
            *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"),
            *("Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter", "GptOssTopKRouter"),
            *("Lfm2MoeTopKRouter", "MellumTopKRouter", "LagunaTopKRouter"),
            *("GraniteMoeTopKRouter", "GraniteMoeHybridTopKRouter", "Mistral4TopkRouter"),
            *("FlexOlmoTopKRouter", "Qwen4ExpTextTopKRouter"),
        ),
        (None, None),
    ),
    **dict.fromkeys(
        (
            *("AfmoeTokenChoiceRouter", "MixtralTopKRouter", "MiniMaxM2TopKRouter"),
            *("MiniMaxM3VLTopKRouter", "Gemma4TextRouter", "Step3p7TopKRouter"),
        ),
        (None, torch.float32),
    ),
    **dict.fromkeys(
        (
            *("DeepseekV2TopkRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter"),
            *("Glm4MoeLiteTopkRouter", "Dots1TopkRouter", "SolarOpenTopkRouter", "HYV3TopKRouter"),
            *("ExaoneMoeTopkRouter", "NemotronHTopkRouter", "KimiLinearTopkRouter"),
            *("BailingHybridTopkRouter", "MiMoV2FlashTopkRouter"),
            *("DeepseekV32TopkRouter", "GlmMoeDsaTopkRouter", "Glm5NextTextTopkRouter"),
        ),
        (torch.float32, torch.float32),
    ),
    "Ernie4_5_MoeTopKRouter": (torch.float32, None),
    # Its matrix is float32, and rows with it, unless it was published in 16 bits.
    "HunYuanMoEV1Gate": (None, None),
}

# Routers whose logits are rounded as the rows are, and float32 then.
WIDENED = frozenset(
    {
        *("LagunaTopKRouter", "AfmoeTokenChoiceRouter"),
        *("GraniteMoeTopKRouter", "GraniteMoeHybridTopKRouter"),
    }
)

Forward = Callable[..., Any]


def own_forward(module: nn.Module) -> Forward:
    """Return a module's own forward, without a strong reference to the module: the module holds its
    replacement, and the cycle would free memory late.
    """
    module.__dict__.pop("forward", None)  # an earlier replacement
    method = WeakMethod(module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return present(method(), "a module's forward ran after the module was freed")(
            *args, **kwargs
        )

    return forward


@dataclass(slots=True, eq=False)
class FusedNorm:
    """A fused RMS norm of rows [T, H]. Given `others`, it adds them first and returns the sum as
    well.

    group  columns that are normed together, where rows are normed in parts; None: all
    """

    norm: RMSNorm
    forward: Forward
    group: int | None = None

    def __call__(self, hidden_states: Tensor, others: Tensor | None = None) -> Any:
        if others is not None:
            return decoder_ops.add_rms_norm(hidden_states, others, self.norm)
        if not decoder_ops.takes(hidden_states) or not hidden_states.is_contiguous():
            return self.forward(hidden_states)
        rows = hidden_states.view(-1, self.group or hidden_states.shape[-1])
        return decoder_ops.rms_norm(rows, self.norm).view(hidden_states.shape)


@dataclass(slots=True, eq=False)
class FusedRouter:
    """A fused router: logits [T, E], weights [T, K] and ids [T, K] of rows [T, H].

    weight, bias  of its logits
    dtypes        of logits and of weights; None: that of the rows
    prepare       made of the rows before their product; None: nothing
    shown         makes what it returns of its logits; None: returns them
    """

    weight: Tensor
    bias: Tensor | None
    top_k: int
    rule: RouterRule
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    forward: Forward
    prepare: Callable[[Tensor], Tensor] | None = None
    shown: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, hidden_states: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """others: what the rule has already"""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if rows.shape[0] > MAX_LINEAR_ROWS or not decoder_ops.takes(rows):
            scores: tuple[Tensor, Tensor, Tensor] = self.forward(hidden_states, *others)
            return scores
        if self.prepare is not None:
            rows = self.prepare(rows)
        logits = linear(rows.to(self.weight.dtype), self.weight, self.bias, self.dtypes[0])
        routed = decoder_ops.route(logits, self.top_k, self.rule, self.dtypes[1] or rows.dtype)
        return logits if self.shown is None else self.shown(logits), *routed


def fuse_norm(module: nn.Module) -> bool:
    """Replace the forward of a usual norm by FusedNorm. Return True if it was replaced."""
    name = type(module).__name__
    if name in NORMS_ROUNDED_ONCE and hasattr(module, "weight"):
        group = getattr(module, "group_size", None)
        module.forward = FusedNorm(wide_norm_of(module), own_forward(module), group)
        return True
    if name not in NORMS:
        return False
    module.forward = FusedNorm(rms_norm_of(module), own_forward(module))
    return True


def fuse_router(module: Any, gate: RouterGate) -> bool:
    """Replace the forward of a usual router with this gate by FusedRouter. Return True if it was
    replaced.
    """
    name = type(module).__name__
    capped = getattr(module, "router_logit_softcapping", 0.0) > 0.0
    if name not in ROUTERS or not isinstance(gate, ScoreGate) or capped:
        return False
    forward, dtypes = own_forward(module), ROUTERS[name]
    if name == "Gemma4TextRouter":
        top_k, matrix = module.config.top_k_experts, module.proj.weight
        module.forward = FusedRouter(
            *(matrix, None, top_k, gate.rule, dtypes, forward, scaled_norm(module), shares_of)
        )
        return True
    named = [getattr(module, each).weight for each in ("wg", "gate") if hasattr(module, each)]
    matrix = named[0] if named else module.weight
    if name == "HunYuanMoEV1Gate":
        dtypes = matrix.dtype, matrix.dtype
    bias = getattr(module, "bias", None)
    shown = Tensor.float if name in WIDENED else None
    module.forward = FusedRouter(
        *(matrix, bias, module.top_k, gate.rule, dtypes, forward), shown=shown
    )
    return True


def shares_of(logits: Tensor) -> Tensor:
    """What Gemma4TextRouter returns of its logits."""
    return logits.softmax(-1, dtype=torch.float32)


def scaled_norm(router: Any) -> Callable[[Tensor], Tensor]:
    """What Gemma4TextRouter makes of its rows first."""
    norm, scale, root = (
        wide_norm_of(router.norm, router.hidden_size),
        router.scale,
        router.scalar_root_size,
    )

    def prepare(rows: Tensor) -> Tensor:
        return decoder_ops.rms_norm(rows, norm) * scale * root

    return prepare


def rms_norm_of(module: nn.Module) -> RMSNorm:
    return RMSNorm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def wide_norm_of(module: Any, columns: int = 0) -> RMSNorm:
    """One of NORMS_ROUNDED_ONCE. columns: of one without a weight"""
    eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
    if not hasattr(module, "weight"):
        return RMSNorm(torch.ones(columns), eps)
    weight = module.weight.detach().float()
    return RMSNorm(weight + NORMS_ROUNDED_ONCE[type(module).__name__], eps)
