"""Fused modules: one call per module for a few tokens of each sequence, in chains or trees.

Each class replaces the `forward` of a module of transformers and uses its weights and parts. Other
inputs go to the module's own forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from speq.errors import present
from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import Heads, Latents, Positions, RMSNorm
from speq.kernels.ops import MAX_LINEAR_ROWS, linear
from speq.layers.arguments import refuse_unknown

# Classes of transformers with the usual forward, which is reimplemented here.
ATTENTIONS = frozenset(
    f"{family}Attention"
    for family in (
        *("Qwen2Moe", "Qwen3Moe", "Olmoe", "Mixtral", "Phimoe"),
        *("Glm4Moe", "MiniMaxM2", "Dots1", "SolarOpen", "GptOss", "Lfm2Moe"),
    )
)
# Classes whose results are multiplied by gates that their queries' projection makes as well.
GATED_ATTENTIONS = frozenset({"Qwen3NextAttention", "Qwen3_5MoeAttention"})
# Classes with latent attention.
LATENT_ATTENTIONS = frozenset(
    {"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"}
)
# They always rotate neighbouring columns together; the configuration of the others says so.
INTERLEAVED = frozenset({"DeepseekV2Attention"})
# Their cos and sin are for half a head; the other half uses the same ones.
HALF_TURNS = frozenset({"GptOssRotaryEmbedding"})
# They take positions [3, 1, P] in time, height and width, which are alike in text.
GRID_TURNS = frozenset({"Qwen3_5MoeTextRotaryEmbedding"})
# They return complex numbers in place of cos and sin.
COMPLEX_TURNS = frozenset({"DeepseekV2RotaryEmbedding"})
NORMS = frozenset(
    f"{family}RMSNorm"
    for family in (
        *("Qwen2Moe", "Qwen3Moe", "Olmoe", "Mixtral", "DeepseekV2", "DeepseekV3"),
        *("Glm4Moe", "Glm4MoeLite", "MiniMaxM2", "Dots1", "SolarOpen"),
        *("Ernie4_5_Moe", "HunYuanMoEV1", "Lfm2Moe"),
    )
)
# Norms whose rows are rounded once, at the end, and what is added to their weights.
NORMS_ROUNDED_ONCE = {
    "GptOssRMSNorm": 0.0,
    "Qwen3NextRMSNorm": 1.0,
    "Qwen3_5MoeRMSNorm": 1.0,
}
# Softmax, top-k and a division by the sum, if the configuration says so.
ROUTERS = frozenset(
    {"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "Qwen3NextTopKRouter"}
)
# They always divide. dtype of their weights; None: that of the logits.
DIVIDING_ROUTERS = {"MixtralTopKRouter": torch.float32, "Qwen3_5MoeTopKRouter": None}

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


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """New tokens of one sequence.

    rows       their rows in the pass
    positions  their positions, and their tree, if any
    layers     layers of the sequence's KV cache
    """

    rows: slice
    positions: Positions
    layers: Any


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """New tokens of all sequences, given to attention in place of a mask.

    window  most positions a token looks back, its own included; None: no limit
    """

    sequences: Sequence[DecodeSpan]
    window: int | None


@dataclass(slots=True, eq=False)
class FusedNorm:
    """A fused RMS norm of rows [T, H]. Given `others`, it adds them first and returns the sum as
    well.
    """

    norm: RMSNorm
    forward: Forward

    def __call__(self, hidden_states: Tensor, others: Tensor | None = None) -> Any:
        if others is not None:
            return decoder_ops.add_rms_norm(hidden_states, others, self.norm)
        if not decoder_ops.takes(hidden_states) or not hidden_states.is_contiguous():
            return self.forward(hidden_states)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return decoder_ops.rms_norm(rows, self.norm).view(hidden_states.shape)


@dataclass(slots=True, eq=False)
class FusedRouter:
    """A fused router: logits [T, E], weights [T, K] and ids [T, K] of rows [T, H].

    dtype  dtype of the weights; None: that of the logits
    """

    weight: Tensor
    top_k: int
    normalised: bool
    dtype: torch.dtype | None
    forward: Forward

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if rows.shape[0] > MAX_LINEAR_ROWS or not decoder_ops.takes(rows):
            scores: tuple[Tensor, Tensor, Tensor] = self.forward(hidden_states)
            return scores
        logits = linear(rows, self.weight)
        dtype = self.dtype or logits.dtype
        return logits, *decoder_ops.route(logits, self.top_k, self.normalised, dtype)


@dataclass(slots=True, eq=False)
class FusedLogits:
    """A router of which only the logits are fused.

    choose  makes the router's results of it, its logits [T, E], and its further arguments
    router  the module, which holds this object
    """

    weight: Tensor
    bias: Tensor | None
    choose: Callable[..., tuple[Tensor, Tensor, Tensor]]
    router: Callable[[], Any]
    forward: Forward

    def __call__(
        self, hidden_states: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if rows.shape[0] > MAX_LINEAR_ROWS or not decoder_ops.takes(rows):
            scores: tuple[Tensor, Tensor, Tensor] = self.forward(hidden_states, *others)
            return scores
        return self.choose(self.router(), linear(rows, self.weight, self.bias), *others)


@dataclass(slots=True, eq=False)
class FusedMixer(ABC):
    """Fused attention of rows [T, H] over what layer `layer` caches, sequence by sequence.

    output   projection of the mixed rows
    forward  the module's own
    """

    output: nn.Module
    layer: int
    forward: Forward

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if not isinstance(attention_mask, DecodeBatch):
            attended: tuple[Tensor, None] = self.forward(
                hidden_states, attention_mask=attention_mask, **others
            )
            return attended
        refuse_unknown(type(self).__name__, others, ())
        return self.output(self.mix(hidden_states, attention_mask)), None

    @abstractmethod
    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        """Attend: the results of all heads, [T, heads * V]."""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: Heads, batch: DecodeBatch, layer: int
) -> Tensor:
    """Attend sequence by sequence over what `layer` caches: [T, heads * D]."""
    mixed = torch.empty_like(queries)
    alone = len(batch.sequences) == 1
    for sequence in batch.sequences:
        decoder_ops.attention(
            queries if alone else queries[sequence.rows],
            keys if alone else keys[sequence.rows],
            values if alone else values[sequence.rows],
            heads,
            sequence.positions,
            batch.window,
            sequence.layers[layer].row,
            mixed if alone else mixed[sequence.rows],
        )
    return mixed


@dataclass(slots=True, eq=False)
class FusedAttention(FusedMixer):
    """Attention over heads of keys and values."""

    projections: tuple[nn.Module, nn.Module, nn.Module]
    heads: Heads

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        queries, keys, values = (project(hidden_states) for project in self.projections)
        return attend(queries, keys, values, self.heads, batch, self.layer)


@dataclass(slots=True, eq=False)
class FusedGatedAttention(FusedMixer):
    """Attention over heads of keys and values whose results are gated.

    projections  of queries with their gates, head by head, of keys and of values
    norms        of heads of queries and of keys
    width        of a head
    """

    projections: tuple[nn.Module, nn.Module, nn.Module]
    norms: tuple[RMSNorm, RMSNorm]
    scale: float
    width: int

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        both, keys, values = (project(hidden_states) for project in self.projections)
        rows, width = len(both), self.width
        parts = both.view(rows, -1, 2 * width).chunk(2, -1)
        queries, gates = (part.contiguous().view(-1, width) for part in parts)
        queries = decoder_ops.rms_norm(queries, self.norms[0]).view(rows, -1)
        keys = decoder_ops.rms_norm(keys.view(-1, width), self.norms[1]).view(rows, -1)
        mixed = attend(queries, keys, values, Heads(self.scale), batch, self.layer)
        return mixed * gates.view(rows, -1).sigmoid()


@dataclass(slots=True, eq=False)
class FusedLatentAttention(FusedMixer):
    """Attention over latents.

    queries      modules that make queries of the rows, one after the other
    compress     makes latents and the key columns that are rotated
    value_width  columns of all heads' results
    """

    queries: tuple[nn.Module, ...]
    compress: nn.Module
    latents: Latents
    value_width: int

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        queries, latents = hidden_states, self.compress(hidden_states)
        for module in self.queries:
            queries = module(queries)
        mixed = queries.new_empty(len(queries), self.value_width)
        for sequence in batch.sequences:
            decoder_ops.latent_attention(
                queries[sequence.rows],
                latents[sequence.rows],
                self.latents,
                sequence.positions,
                batch.window,
                sequence.layers[self.layer].row,
                mixed[sequence.rows],
            )
        return mixed


def fuse_norm(module: nn.Module) -> bool:
    """Replace the forward of a usual norm by FusedNorm. Return True if it was replaced."""
    name = type(module).__name__
    if name in NORMS_ROUNDED_ONCE:
        module.forward = FusedNorm(wide_norm_of(module), own_forward(module))
        return True
    if name not in NORMS:
        return False
    module.forward = FusedNorm(rms_norm_of(module), own_forward(module))
    return True


def softmax_of_chosen(router: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GptOssTopKRouter behind its logits."""
    chosen, ids = torch.topk(logits, router.top_k, dim=-1)
    return logits, chosen.softmax(1, dtype=chosen.dtype), ids


def biased_sigmoids(
    router: Any, logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """MiniMaxM2TopKRouter behind its logits."""
    scores = logits.float().sigmoid()
    ids = torch.topk(scores + present(bias, "no bias was given"), router.top_k, sorted=False)[1]
    weights = scores.gather(1, ids)
    return logits, weights / weights.sum(-1, keepdim=True), ids


def scaled_sigmoids(
    router: Any, logits: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Lfm2MoeTopKRouter behind its logits."""
    scores = logits.sigmoid()
    if router.use_expert_bias:
        ids = torch.topk(scores + present(bias, "no bias was given"), router.top_k)[1]
        weights = scores.gather(1, ids).type_as(logits)
    else:
        weights, ids = torch.topk(scores, router.top_k)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return logits, weights * router.routed_scaling_factor, ids


# What routers make of their logits.
ROUTERS_OF_LOGITS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "GptOssTopKRouter": softmax_of_chosen,
    "MiniMaxM2TopKRouter": biased_sigmoids,
    "Lfm2MoeTopKRouter": scaled_sigmoids,
}


def fuse_router(module: nn.Module) -> bool:
    """Replace the forward of a usual router by FusedRouter. Return True if it was replaced."""
    name = type(module).__name__
    if name in ROUTERS_OF_LOGITS:
        router: Any = module
        choose, bias = ROUTERS_OF_LOGITS[name], getattr(module, "bias", None)
        module.forward = FusedLogits(router.weight, bias, choose, ref(module), own_forward(module))
        return True
    if name not in ROUTERS and name not in DIVIDING_ROUTERS:
        return False
    weight, top_k = cast(Tensor, module.weight), cast(int, module.top_k)
    normalised = name in DIVIDING_ROUTERS or bool(module.norm_topk_prob)
    dtype = DIVIDING_ROUTERS.get(name)
    module.forward = FusedRouter(weight, top_k, normalised, dtype, own_forward(module))
    return True


# Usual names of the norms of queries and keys.
NORM_NAMES = ("q_norm", "k_norm")


def fuse_attention(module: Any) -> bool:
    """Replace the forward of usual attention by FusedAttention, of gated attention by
    FusedGatedAttention, and of latent attention by FusedLatentAttention. Return True if it was
    replaced.
    """
    if type(module).__name__ in LATENT_ATTENTIONS:
        module.forward = fused_latent_attention(module)
        return True
    if type(module).__name__ in GATED_ATTENTIONS:
        module.forward = FusedGatedAttention(
            module.o_proj,
            module.layer_idx,
            own_forward(module),
            (module.q_proj, module.k_proj, module.v_proj),
            (wide_norm_of(module.q_norm), wide_norm_of(module.k_norm)),
            module.scaling,
            module.head_dim,
        )
        return True
    clipped = getattr(module.config, "clip_qkv", None) is not None
    if type(module).__name__ not in ATTENTIONS or clipped:
        return False
    names = ("q_layernorm", "k_layernorm") if hasattr(module, "q_layernorm") else NORM_NAMES
    norms = [getattr(module, name, None) for name in names]
    query_norm, key_norm = (None if norm is None else rms_norm_of(norm) for norm in norms)
    module.forward = FusedAttention(
        module.o_proj if hasattr(module, "o_proj") else module.out_proj,
        module.layer_idx,
        own_forward(module),
        (module.q_proj, module.k_proj, module.v_proj),
        Heads(module.scaling, query_norm, key_norm, sinks_of(module)),
    )
    return True


def fused_latent_attention(module: Any) -> FusedLatentAttention:
    low_rank = (module.q_a_proj, module.q_a_layernorm, module.q_b_proj)
    interleaved = type(module).__name__ in INTERLEAVED or bool(module.config.rope_interleave)
    return FusedLatentAttention(
        module.o_proj,
        module.layer_idx,
        own_forward(module),
        low_rank if module.q_proj is None else (module.q_proj,),
        module.kv_a_proj_with_mqa,
        Latents(
            rms_norm_of(module.kv_a_layernorm),
            module.kv_b_proj.exact.words(),
            module.scaling,
            interleaved,
        ),
        module.num_heads * module.v_head_dim,
    )


def sinks_of(module: nn.Module) -> Tensor | None:
    """Sinks [heads] of attention; None if it has none."""
    sinks = getattr(module, "sinks", None)
    return None if sinks is None else sinks.detach()


def rms_norm_of(module: nn.Module) -> RMSNorm:
    return RMSNorm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def wide_norm_of(module: nn.Module) -> RMSNorm:
    """One of NORMS_ROUNDED_ONCE."""
    weight = cast(Tensor, module.weight).detach().float()
    eps: Any = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return RMSNorm(weight + NORMS_ROUNDED_ONCE[type(module).__name__], eps)
