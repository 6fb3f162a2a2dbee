"""Fused attention: one call per module for a few tokens of each sequence, in chains or trees.

Each class replaces the `forward` of a module of transformers and uses its weights and parts. Other
inputs go to the module's own forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import Heads, Latents, Positions, RMSNorm
from speq.layers.arguments import refuse_unknown
from speq.layers.fused_modules import (
    NORMS_ROUNDED_ONCE,
    Forward,
    own_forward,
    rms_norm_of,
    wide_norm_of,
)
from speq.layers.indexer import Indexer

# Classes of transformers with the usual forward, which is reimplemented here.
ATTENTIONS = frozenset(
    f"{family}Attention"
    for family in (
        *("Qwen2Moe", "Qwen3Moe", "Olmoe", "Mixtral", "Phimoe"),
        *("Glm4Moe", "MiniMaxM2", "Dots1", "SolarOpen", "GptOss", "Lfm2Moe", "Mellum", "HYV3"),
        *("ExaoneMoe", "GraniteMoe", "GraniteMoeHybrid", "NemotronH", "MiMoV2Flash"),
        "FlexOlmo",
    )
)
# Classes whose results are multiplied by gates that their queries' projection makes as well.
GATED_ATTENTIONS = frozenset({"Qwen3NextAttention", "Qwen3_5MoeAttention", "Qwen4ExpTextAttention"})
# Classes whose results are multiplied by gates of a projection of their own.
SCALED_ATTENTIONS = frozenset({"LagunaAttention", "AfmoeAttention", "Step3p7Attention"})
# Classes that rotate heads before they norm them, or as complex numbers, and whether they do the
# latter.
ROTATED_FIRST = {"HunYuanMoEV1Attention": False, "Ernie4_5_MoeAttention": True}
# Classes that norm heads of values too.
NORMED_VALUES = frozenset({"Gemma4TextAttention"})
# Classes with latent attention.
LATENT_ATTENTIONS = frozenset(
    {
        *("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"),
        *("KimiLinearAttention", "BailingHybridAttention", "Mistral4Attention"),
        *("DeepseekV32Attention", "GlmMoeDsaAttention"),
    }
)
# They always rotate neighbouring columns together; the configuration of the others says so.
INTERLEAVED = frozenset(
    {
        *("DeepseekV2Attention", "BailingHybridAttention"),
        *("DeepseekV32Attention", "GlmMoeDsaAttention"),
    }
)
# What makes queries of latent attention where these have latents too.
LOW_RANK = ("q_a_proj", "q_a_layernorm", "q_b_proj")
# Their cos and sin are for half a head; the other half uses the same ones.
HALF_TURNS = frozenset({"GptOssRotaryEmbedding"})
# Their cos and sin are float32 whatever the rows are.
WIDE_TURNS = frozenset({"FlexOlmoRotaryEmbedding"})
# They take positions [3, 1, P] in time, height and width, which are alike in text.
GRID_TURNS = frozenset({"Qwen3_5MoeTextRotaryEmbedding", "Qwen4ExpTextRotaryEmbedding"})
# They return complex numbers in place of cos and sin.
COMPLEX_TURNS = frozenset({"DeepseekV2RotaryEmbedding"})
# Their cos and sin are for complex numbers, twice over.
PAIR_TURNS = frozenset({"Ernie4_5_MoeRotaryEmbedding"})
# They differ between kinds of layers, which they are called with.
TURNS_BY_KIND = frozenset(
    {
        *("Gemma4TextRotaryEmbedding", "MellumRotaryEmbedding", "LagunaRotaryEmbedding"),
        *("MiMoV2FlashRotaryEmbedding", "Step3p7RotaryEmbedding"),
    }
)


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

    window     most positions a token looks back, its own included; None: no limit
    token_ids  [T] of all
    """

    sequences: Sequence[DecodeSpan]
    window: int | None
    token_ids: Tensor


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
        *turns: Any,
        attention_mask: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if not isinstance(attention_mask, DecodeBatch):
            attended: tuple[Tensor, None] = self.forward(
                hidden_states, *turns, attention_mask=attention_mask, **others
            )
            return attended
        refuse_unknown(type(self).__name__, others, ())
        return self.output(self.mix(hidden_states, attention_mask)), None

    @abstractmethod
    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        """Attend: the results of all heads, [T, heads * V]."""


def choose(indexer: Any, batch: DecodeBatch, layer: int, *rows: Tensor) -> list[Tensor | None]:
    """What rows attend to of what `layer` caches, sequence by sequence, as `decoder_ops.attention`
    has it.

    indexer  chooses by rows [T, ...]; None: nothing does
    """
    if indexer is None:
        return [None] * len(batch.sequences)
    return [
        each.layers[layer].choose(indexer, each.positions, *(part[each.rows] for part in rows))
        for each in batch.sequences
    ]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: Heads,
    batch: DecodeBatch,
    layer: int,
    chosen: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Attend sequence by sequence over what `layer` caches: [T, heads * V].

    chosen  what `choose` returned; None: nothing was chosen
    """
    cached_keys, cached_values = batch.sequences[0].layers[layer].row[:2]
    heads_of_rows = queries.shape[1] // cached_keys.shape[2]
    mixed = queries.new_empty(len(queries), heads_of_rows * cached_values.shape[2])
    alone = len(batch.sequences) == 1
    for at, sequence in enumerate(batch.sequences):
        decoder_ops.attention(
            queries if alone else queries[sequence.rows],
            keys if alone else keys[sequence.rows],
            values if alone else values[sequence.rows],
            heads,
            sequence.positions,
            batch.window,
            sequence.layers[layer].row[:2],
            mixed if alone else mixed[sequence.rows],
            None if chosen is None else chosen[at],
        )
    return mixed


def norm_heads(rows: Tensor, norm: RMSNorm) -> Tensor:
    """Norm each head of rows [T, heads * D]."""
    return decoder_ops.rms_norm(rows.view(-1, len(norm.weight)), norm).view(rows.shape)


def without_turns(batch: DecodeBatch, like: Tensor) -> DecodeBatch:
    """The batch of rows that are rotated already, or not at all."""
    spans = []
    for span in batch.sequences:
        none = like.new_empty(len(span.positions.cos), 0)
        spans.append(replace(span, positions=replace(span.positions, cos=none, sin=none)))
    return replace(batch, sequences=spans)


@dataclass(slots=True, eq=False)
class FusedAttention(FusedMixer):
    """Attention over heads of keys and values.

    is_rotated  False in a layer without positions
    """

    projections: tuple[Callable[[Tensor], Tensor], ...]
    heads: Heads
    is_rotated: bool = True

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        queries, keys, values = (project(hidden_states) for project in self.projections)
        if not self.is_rotated:
            batch = without_turns(batch, queries)
        return attend(queries, keys, values, self.heads, batch, self.layer)


@dataclass(slots=True, eq=False)
class FusedScaledAttention(FusedAttention):
    """Attention over heads of keys and values whose results are multiplied by gates.

    gates  makes a gate of a row for each head, or each element
    width  of a head
    """

    gates: Callable[[Tensor], Tensor] = field(kw_only=True)
    width: int = field(kw_only=True)

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        # super() has no class to begin at in a dataclass with slots.
        mixed = FusedAttention.mix(self, hidden_states, batch)
        gates = self.gates(hidden_states)
        if gates.shape != mixed.shape:
            return (mixed.view(len(mixed), -1, self.width) * gates[..., None]).view(mixed.shape)
        return mixed * gates


@dataclass(slots=True, eq=False)
class FusedGatedAttention(FusedMixer):
    """Attention over heads of keys and values whose results are gated.

    projections  of queries with their gates, head by head, of keys and of values
    norms        of heads of queries and of keys
    width        of a head
    indexer      chooses what rows attend to; None: all that they see
    """

    projections: tuple[nn.Module, nn.Module, nn.Module]
    norms: tuple[RMSNorm, RMSNorm]
    scale: float
    width: int
    indexer: Any = None

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        chosen = choose(self.indexer, batch, self.layer, hidden_states)
        both, keys, values = (project(hidden_states) for project in self.projections)
        parts = both.view(len(both), -1, 2 * self.width).chunk(2, -1)
        queries, gates = (part.contiguous().view(len(both), -1) for part in parts)
        queries = norm_heads(queries, self.norms[0])
        keys = norm_heads(keys, self.norms[1])
        mixed = attend(queries, keys, values, Heads(self.scale), batch, self.layer, chosen)
        return mixed * gates.sigmoid()


@dataclass(slots=True, eq=False)
class FusedRotatedAttention(FusedMixer):
    """Attention whose heads are rotated before they are normed, or as complex numbers.

    norms        of heads of queries and of keys; None: there are none
    width        of a head
    interleaved  as `reference_decoder.rotate_out` has it
    """

    projections: tuple[nn.Module, nn.Module, nn.Module]
    norms: tuple[RMSNorm, RMSNorm] | None
    scale: float
    width: int
    interleaved: bool

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        queries, keys, values = (project(hidden_states) for project in self.projections)
        for each in batch.sequences:
            for rows in (queries, keys):
                decoder_ops.rotate(rows[each.rows], self.width, each.positions, self.interleaved)
        if self.norms is not None:
            queries, keys = norm_heads(queries, self.norms[0]), norm_heads(keys, self.norms[1])
        batch = without_turns(batch, queries)
        return attend(queries, keys, values, Heads(self.scale), batch, self.layer)


@dataclass(slots=True, eq=False)
class FusedNormedAttention(FusedMixer):
    """Attention whose heads of queries, keys and values are normed.

    projections  of queries, keys and values; None: values are made by that of keys
    norms        of their heads
    """

    projections: tuple[nn.Module, nn.Module, nn.Module | None]
    norms: tuple[RMSNorm, RMSNorm, RMSNorm]
    scale: float

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        project_queries, project_keys, project_values = self.projections
        queries, keys = project_queries(hidden_states), project_keys(hidden_states)
        values = keys if project_values is None else project_values(hidden_states)
        queries, keys, values = (
            norm_heads(*each) for each in zip((queries, keys, values), self.norms, strict=True)
        )
        return attend(queries, keys, values, Heads(self.scale), batch, self.layer)


@dataclass(slots=True, eq=False)
class FusedLatentAttention(FusedMixer):
    """Attention over latents.

    queries      modules that make queries of the rows, one after the other
    compress     makes latents and the key columns that are rotated
    value_width  columns of all heads' results
    gates        makes what heads' results are multiplied by the sigmoid of; None: nothing
    indexer      chooses what rows attend to; None: all that they see
    chooses      whether it chooses in this layer; False: in a layer before
    """

    queries: tuple[nn.Module, ...]
    compress: nn.Module
    latents: Latents
    value_width: int
    gates: nn.Module | None = None
    indexer: Indexer | None = None
    chooses: bool = False

    def mix(self, hidden_states: Tensor, batch: DecodeBatch) -> Tensor:
        *low_rank, last = self.queries
        queries, latents = hidden_states, self.compress(hidden_states)
        for module in low_rank:
            queries = module(queries)
        chosen = self.choose(hidden_states, queries, batch)
        queries = last(queries)
        for sequence in batch.sequences:
            if sequence.positions.query_scale is not None:
                queries[sequence.rows].mul_(sequence.positions.query_scale)
        mixed = queries.new_empty(len(queries), self.value_width)
        for sequence, of_sequence in zip(batch.sequences, chosen, strict=True):
            decoder_ops.latent_attention(
                queries[sequence.rows],
                latents[sequence.rows],
                self.latents,
                sequence.positions,
                batch.window,
                sequence.layers[self.layer].row[:2],
                mixed[sequence.rows],
                of_sequence,
            )
        if self.gates is None:
            return mixed
        gates = self.gates(hidden_states).float().sigmoid().to(mixed.dtype)
        return (mixed.view(*gates.shape, -1) * gates.unsqueeze(-1)).flatten(1)

    def choose(
        self, hidden_states: Tensor, query_latents: Tensor, batch: DecodeBatch
    ) -> Sequence[Tensor | None]:
        """What rows attend to, as `choose` has it."""
        indexer = self.indexer
        if indexer is not None and not self.chooses:
            return indexer.chosen
        chosen = choose(indexer, batch, self.layer, hidden_states, query_latents)
        if indexer is not None:
            indexer.chosen = chosen
        return chosen


# Usual names of the norms of queries and keys.
NORM_NAMES = ("q_norm", "k_norm")


def fuse_attention(module: Any) -> bool:
    """Replace the forward of attention of a known kind by a fused one. Return True if it was
    replaced.
    """
    fuse = fusing(type(module).__name__)
    if fuse is None or getattr(module.config, "clip_qkv", None) is not None:
        return False
    module.forward = fuse(module)
    return True


def fusing(name: str) -> Callable[[Any], FusedMixer] | None:
    """What makes the fused attention of a module of this class; None: nothing does."""
    for names, fuse in (
        (ATTENTIONS, fused_attention),
        (GATED_ATTENTIONS, fused_gated_attention),
        (SCALED_ATTENTIONS, fused_scaled_attention),
        (ROTATED_FIRST, fused_rotated_attention),
        (NORMED_VALUES, fused_normed_attention),
        (LATENT_ATTENTIONS, fused_latent_attention),
    ):
        if name in names:
            return fuse
    return None


def parts_of(module: Any) -> tuple[Any, ...]:
    """What FusedAttention has of a module."""
    names = ("q_layernorm", "k_layernorm") if hasattr(module, "q_layernorm") else NORM_NAMES
    norms: list[Any] = [getattr(module, name, None) for name in names]
    makers: list[Callable[[Tensor], Tensor]] = [module.q_proj, module.k_proj]
    if type(norms[0]).__name__ in NORMS_ROUNDED_ONCE:  # the attention op has none of these
        makers = [normed_heads(*each) for each in zip(makers, norms, strict=True)]
        norms = [None, None]
    query_norm, key_norm = (None if norm is None else rms_norm_of(norm) for norm in norms)
    return (
        module.o_proj if hasattr(module, "o_proj") else module.out_proj,
        module.layer_idx,
        own_forward(module),
        (*makers, values_of(module)),
        Heads(module.scaling, query_norm, key_norm, sinks_of(module)),
        is_rotated(module),
    )


def normed_heads(
    project: Callable[[Tensor], Tensor], norm: nn.Module
) -> Callable[[Tensor], Tensor]:
    """What makes heads of rows [T, H] and norms them."""
    wide = wide_norm_of(norm)
    return lambda rows: norm_heads(project(rows), wide)


def values_of(module: Any) -> Callable[[Tensor], Tensor]:
    """What makes values of rows [T, H]."""
    project, scale = module.v_proj, getattr(module, "v_scale", 1.0)

    def scaled(rows: Tensor) -> Tensor:
        values: Tensor = project(rows) * scale
        return values

    return project if scale == 1.0 else scaled


def fused_attention(module: Any) -> FusedAttention:
    return FusedAttention(*parts_of(module))


def fused_scaled_attention(module: Any) -> FusedAttention:
    def softplus(rows: Tensor) -> Tensor:
        return functional.softplus(project(rows).float()).to(rows.dtype)

    def sigmoid(rows: Tensor) -> Tensor:
        gates: Tensor = project(rows).sigmoid()
        return gates

    project = module.g_proj if hasattr(module, "g_proj") else module.gate_proj
    gates = softplus if type(module).__name__ == "LagunaAttention" else sigmoid
    return FusedScaledAttention(*parts_of(module), gates=gates, width=module.head_dim)


def is_rotated(module: Any) -> bool:
    """False for attention without a window that leaves positions to the layers with one."""
    name = type(module).__name__
    if name == "ExaoneMoeAttention":
        return module.sliding_window is None or bool(module.is_sliding)
    return name != "AfmoeAttention" or bool(module.is_local_attention)


def fused_gated_attention(module: Any) -> FusedGatedAttention:
    return FusedGatedAttention(
        module.o_proj,
        module.layer_idx,
        own_forward(module),
        (module.q_proj, module.k_proj, module.v_proj),
        (wide_norm_of(module.q_norm), wide_norm_of(module.k_norm)),
        module.scaling,
        module.head_dim,
        module.indexer.forward if hasattr(module, "indexer") else None,
    )


def fused_rotated_attention(module: Any) -> FusedRotatedAttention:
    norms = None
    if hasattr(module, "query_layernorm"):
        norms = rms_norm_of(module.query_layernorm), rms_norm_of(module.key_layernorm)
    return FusedRotatedAttention(
        module.o_proj,
        module.layer_idx,
        own_forward(module),
        (module.q_proj, module.k_proj, module.v_proj),
        norms,
        module.scaling,
        module.head_dim,
        ROTATED_FIRST[type(module).__name__],
    )


def fused_normed_attention(module: Any) -> FusedNormedAttention:
    norms = (module.q_norm, module.k_norm, module.v_norm)
    query_norm, key_norm, value_norm = (wide_norm_of(norm, module.head_dim) for norm in norms)
    return FusedNormedAttention(
        module.o_proj,
        module.layer_idx,
        own_forward(module),
        (module.q_proj, module.k_proj, module.v_proj),
        (query_norm, key_norm, value_norm),
        module.scaling,
    )


def fused_latent_attention(module: Any) -> FusedLatentAttention:
    names = ("q_proj",) if getattr(module, "q_proj", None) is not None else LOW_RANK
    interleaved = type(module).__name__ in INTERLEAVED
    interleaved = interleaved or bool(getattr(module.config, "rope_interleave", False))
    return FusedLatentAttention(
        module.o_proj,
        module.layer_idx,
        own_forward(module),
        tuple(getattr(module, name) for name in names),
        module.kv_a_proj_with_mqa,
        Latents(
            rms_norm_of(module.kv_a_layernorm),
            module.kv_b_proj.exact.words(),
            module.scaling,
            interleaved,
        ),
        module.num_heads * module.v_head_dim,
        getattr(module, "g_proj", None),
        module.chooser if hasattr(module, "indexer") else None,
        getattr(module, "indexer", None) is not None,
    )


def sinks_of(module: nn.Module) -> Tensor | None:
    """Sinks [heads] of attention; None if it has none."""
    sinks = getattr(module, "sinks", None)
    return None if sinks is None else sinks.detach()
