"""The fused decoder: the fast path through the decoder's layers for a few tokens of each sequence.

For few tokens, transformers' own forward takes longer than its computations. The fused decoder
calls the same modules in the same order, on rows [T, H], and fuses each addition with the next
norm.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.errors import Broken, present
from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import Positions
from speq.layers.arguments import refuse_unknown
from speq.layers.fused_attention import (
    COMPLEX_TURNS,
    GRID_TURNS,
    HALF_TURNS,
    PAIR_TURNS,
    TURNS_BY_KIND,
    WIDE_TURNS,
    DecodeBatch,
    DecodeSpan,
    fuse_attention,
)
from speq.layers.fused_modules import FusedNorm, fuse_norm, fuse_router, own_forward
from speq.models.family import Family
from speq.models.hidden_state_capture import HiddenStateCapture
from speq.models.layer_parts import parts_of
from speq.models.layer_range import next_stage_layer, own_layers
from speq.models.packed_batch import BatchSpan, states_of
from speq.models.states import StateShape
from speq.models.tree import Tree

logger = logging.getLogger("speq")

# The kind of all layers in a model with one mask.
ANY_KIND = "any"
# Layers whose routed experts run beside their feed-forward.
GEMMA_LAYERS = frozenset({"Gemma4TextDecoderLayer"})
# Layers whose parts' results are multiplied before they are added.
MULTIPLIED = frozenset({"GraniteMoeDecoderLayer", "GraniteMoeHybridDecoderLayer"})
# Names of the norms behind a layer's mixer and behind its feed-forward, in layers that have both.
NORMS_BEHIND = {
    "AfmoeDecoderLayer": ("post_attention_layernorm", "post_mlp_layernorm"),
    "FlexOlmoDecoderLayer": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
# Layers that have those alone.
NORMED_BEHIND_ALONE = frozenset({"FlexOlmoDecoderLayer"})
# Layers that pass on several rows of a token, side by side, and norm them as they mix them.
STREAM_LAYERS = frozenset({"Qwen4ExpTextDecoderLayer"})
# Names of the norms before a layer's mixer and before its feed-forward, or before its only part.
NORM_NAMES = (
    ("input_layernorm", "pre_mlp_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm"),
    ("input_layernorm", "post_attention_layernorm"),
    ("operator_norm", "ffn_norm"),
    ("norm",),
)
NO_NORM = "a layer follows the last one"

# Positions whose rotary embeddings are computed at a time.
POSITIONS = 256


class DecoderOutput(NamedTuple):
    """last_hidden_state  [1, T, H], as transformers' outputs have it."""

    last_hidden_state: Tensor


QueryScale = Callable[[Tensor], Tensor]


def query_scale_of(config: Any) -> QueryScale | None:
    """What a model multiplies queries by, made of their positions [T]; None: nothing.

    Beyond the length that a model was first trained on it grows with the logarithm of a position,
    as in Llama 4.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    beta = rotary.get("llama_4_scaling_beta")
    if beta is None:
        return None
    length = rotary["original_max_position_embeddings"]
    return lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / length))


class RotaryTable:
    """Rotary cos and sin, computed once for many positions.

    rotary_emb  called with a tensor of the wanted dtype and position_ids [1, P]
    ahead       whether they may be computed before a sequence gets there
    scale       makes of positions what queries are multiplied by; None: nothing
    """

    def __init__(
        self,
        rotary_emb: Callable[..., tuple[Tensor, Tensor]],
        ahead: bool,
        scale: QueryScale | None = None,
    ) -> None:
        self._rotary_emb, self._scale = rotary_emb, scale
        self._count = POSITIONS if ahead else 0
        self._first = 0
        self._cos = self._sin = torch.empty(0)

    def at(self, start: int, like: Tensor, tree: Tree | None = None) -> Positions:
        """Return cos and sin of the rows of `like` [T, H], whose KV is written from `start` on.

        tree  the rows are its last nodes; None: they follow one another
        """
        rows = like.shape[0]
        if tree is None:
            at = self._from(start, rows, like)
            found = Positions(start, self._cos[at : at + rows], self._sin[at : at + rows])
            positions = torch.arange(start, start + rows)
        else:
            depths = tree.depths()
            at = self._from(start - tree.first, max(depths) + 1, like)
            deep = torch.tensor(depths[tree.first :])
            cos, sin = self._cos[deep + at], self._sin[deep + at]
            found = Positions(start, cos, sin, torch.tensor(tree.parents))
            positions = deep + start - tree.first
        if self._scale is None:
            return found
        return replace(found, query_scale=self._scale(positions).to(like.dtype)[:, None])

    def _from(self, first: int, count: int, like: Tensor) -> int:
        """Extend the table to `count` positions from `first` on. Return the place of `first`."""
        at = first - self._first
        if not self._count or at < 0 or at + count > self._cos.shape[0]:
            wanted = torch.arange(first, first + max(self._count, count))
            cos, sin = self._rotary_emb(like, position_ids=wanted[None])
            self._cos, self._sin = cos[0], sin[0]
            self._first, at = first, 0
        return at


@dataclass(frozen=True, slots=True)
class AttentionWindows:
    """Rows and attention windows of a pass, given to a model in place of masks.

    spans  rows of each sequence
    of     window of each kind of layer, a token's own position included; None: no limit
    """

    spans: Sequence[BatchSpan]
    of: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class LocatedSequence:
    """New tokens of one sequence, as DecodeSpan has them.

    positions  by kind of layer, or of ANY_KIND alone where all kinds have the same rotary
               embeddings
    """

    rows: slice
    positions: Mapping[str, Positions]
    layers: Any

    def span(self, kind: str) -> DecodeSpan:
        """What layers of one kind see."""
        positions = self.positions.get(kind) or self.positions[ANY_KIND]
        return DecodeSpan(self.rows, positions, self.layers)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer.

    kind       a key of `AttentionWindows`
    mixer      its attention, or what keeps a state in place of KV
    has_state  which of the two
    next_norm  None for a stage's last layer
    """

    kind: str
    mixer: nn.Module
    has_state: bool
    norm: nn.Module
    feed_forward: nn.Module
    next_norm: nn.Module | None

    def run(
        self, hidden: Tensor, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows [T, H] and their norm. Return the layer's results, and their norm for the next
        layer, if there is one.
        """
        hidden, normed = add_and_norm(hidden, self.mix(normed, batches, states), self.norm)
        update = self.feed(normed)
        if self.next_norm is None:
            return hidden + update, None
        return add_and_norm(hidden, update, self.next_norm)

    def mix(self, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any) -> Tensor:
        """Run the mixer: [T, H]."""
        if self.has_state:
            mixed: Tensor = self.mixer(normed[None], cache_params=states)[0]
        else:
            mixed, _ = self.mixer(normed, attention_mask=batches[self.kind])
        return mixed

    def feed(self, normed: Tensor) -> Tensor:
        """Run the feed-forward: [T, H]."""
        made = self.feed_forward(normed[None])
        # Some return logits besides.
        fed: Tensor = (made[0] if isinstance(made, tuple) else made)[0]
        return fed


@dataclass(frozen=True, slots=True)
class FusedPart(FusedLayer):
    """A layer of one part, which is its mixer and its feed-forward here.

    mixes  whether it is a mixer
    """

    mixes: bool = field(kw_only=True)

    def run(
        self, hidden: Tensor, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any
    ) -> tuple[Tensor, Tensor | None]:
        update = self.mix(normed, batches, states) if self.mixes else self.feed(normed)
        if self.next_norm is None:
            return hidden + update, None
        return add_and_norm(hidden, update, self.next_norm)


@dataclass(frozen=True, slots=True)
class FusedNormedLayer(FusedLayer):
    """A layer whose parts' results are normed before they are added.

    behind  the norms of the mixer's and of the feed-forward's results
    """

    behind: tuple[nn.Module, nn.Module] = field(kw_only=True)

    # super() has no class to begin at in a dataclass with slots.
    def mix(self, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any) -> Tensor:
        mixed: Tensor = self.behind[0](FusedLayer.mix(self, normed, batches, states))
        return mixed

    def feed(self, normed: Tensor) -> Tensor:
        fed: Tensor = self.behind[1](FusedLayer.feed(self, normed))
        return fed


@dataclass(frozen=True, slots=True)
class FusedMultipliedLayer(FusedLayer):
    """A layer whose parts' results are multiplied before they are added.

    multiplier  of both
    shared_mlp  its results are added to those of the feed-forward; None: there is none
    """

    multiplier: float = field(kw_only=True)
    shared_mlp: nn.Module | None = field(kw_only=True)

    def mix(self, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any) -> Tensor:
        return FusedLayer.mix(self, normed, batches, states) * self.multiplier

    def feed(self, normed: Tensor) -> Tensor:
        fed = FusedLayer.feed(self, normed)
        if self.shared_mlp is not None:
            fed = fed + self.shared_mlp(normed)
        return fed * self.multiplier


@dataclass(frozen=True, slots=True)
class FusedGemmaLayer(FusedLayer):
    """A layer whose routed experts run beside its feed-forward, with norms behind each part.

    layer  of Gemma 4; its experts and the other norms are modules of it
    """

    layer: Any = field(kw_only=True)

    def run(
        self, hidden: Tensor, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        update = layer.post_attention_layernorm(self.mix(normed, batches, states))
        hidden, normed = add_and_norm(hidden, update, self.norm)
        dense = layer.post_feedforward_layernorm_1(self.feed_forward(normed))
        _, topk_weights, topk_ids = layer.router(hidden)
        routed = layer.experts(layer.pre_feedforward_layernorm_2(hidden), topk_ids, topk_weights)
        update = dense + layer.post_feedforward_layernorm_2(routed)
        hidden = hidden + layer.post_feedforward_layernorm(update)
        hidden = hidden.mul_(layer.layer_scalar)
        return hidden, None if self.next_norm is None else self.next_norm(hidden)


@dataclass(frozen=True, slots=True)
class FusedStreamLayer(FusedLayer):
    """A layer that passes on several rows of a token, side by side. A mix of them is the input of
    each part, whose result is added to each of them by a weight of its own.

    layer  of Qwen4-Exp; what mixes the rows, and features of n-grams if it has any, are modules of
           it
    """

    layer: Any = field(kw_only=True)

    def run(
        self, hidden: Tensor, normed: Tensor, batches: Mapping[str, DecodeBatch], states: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        if layer.ple is not None:
            token_ids = batches[self.kind].token_ids
            hidden = hidden + layer.ple(hidden[None], token_ids[None], states)[0]
        mixed, gates = mix_streams(layer.attn_hyper_connection, hidden)
        update = self.mix(mixed, batches, states)
        hidden = decoder_ops.add_streams(hidden, update, gates)
        mixed, gates = mix_streams(layer.mlp_hyper_connection, hidden)
        hidden = decoder_ops.add_streams(hidden, self.feed(mixed), gates)
        return hidden, None if self.next_norm is None else self.next_norm(hidden)


class FusedDecoder:
    """Replacement of a model's forward, without its head.

    states  of the layers that keep some
    kinds   kind of each layer
    ahead   whether rotary embeddings may be computed before a sequence gets there
    taps    receives the input of each layer; None: nobody reads it
    """

    def __init__(
        self, body: Any, family: Family, states: StateShape, kinds: list[str], ahead: bool
    ) -> None:
        self.capture: HiddenStateCapture | None = None
        self._forward, self._kinds = own_forward(body), frozenset(kinds)
        self._embed, self._streams = body.get_input_embeddings(), family.streams_of(body.config)
        width = getattr(body.config, "qk_rope_head_dim", 0)
        turns = cos_and_sin(family.rotary_of(body), kinds, width)
        scale = query_scale_of(body.config)
        self._new_tables = lambda: {
            kind: RotaryTable(turn, ahead, scale) for kind, turn in turns.items()
        }
        # By KV slot: batched sequences differ in length.
        self._tables: dict[int, dict[str, RotaryTable]] = {}
        layers: list[Any] = own_layers(body)
        self._last_norm, self._next_stage = getattr(body, family.last_norm), next_stage_layer(body)
        whole = len(layers) == len(body.layers)
        own = [norms_of(layer) for layer in layers]
        following = [*(first for first, *_ in own[1:]), self._last_norm if whole else None]
        self._first_norm = own[0][0]
        self._layers: list[FusedLayer] = []
        for kind, layer, norms, next_norm in zip(kinds, layers, own, following, strict=True):
            mixer, has_state, feed_forward = parts_of(layer, family, states)
            part = present(mixer or feed_forward, "a layer has no part")
            parts = (kind, mixer or part, has_state, norms[-1], feed_forward or part, next_norm)
            if mixer is None or feed_forward is None:
                self._layers.append(FusedPart(*parts, mixes=mixer is not None))
            else:
                self._layers.append(fused_layer(layer, parts))

    def __call__(self, *args: Any, attention_mask: Any = None, **others: Any) -> Any:
        if not isinstance(attention_mask, AttentionWindows):
            return self._forward(*args, attention_mask=attention_mask, **others)
        refuse_unknown(type(self).__name__, others, ("input_ids",))
        token_ids = others["input_ids"][0]
        hidden = self.embed(token_ids)
        sequences = [self.locate(span, hidden) for span in attention_mask.spans]
        states = states_of(attention_mask.spans)
        made = self.walk(token_ids, hidden, sequences, attention_mask.of, states, self._see)
        return DecoderOutput(made[None])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Inputs of the first layer for T tokens: [T, H], H of all rows that a token has."""
        hidden: Tensor = self._embed(token_ids)
        return hidden if self._streams == 1 else hidden.repeat(1, self._streams)

    def walk(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        sequences: Sequence[LocatedSequence],
        windows: Mapping[str, int | None],
        states: Any,
        see: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Run tokens [T], embedded as rows [T, H], through the layers. Return the last hidden
        states [T, H].

        windows  of each kind of layer, as AttentionWindows has them
        states   a cache with those of all sequences, for layers that keep some
        see      called with the number and the input of each layer
        """
        batches = {
            kind: DecodeBatch([each.span(kind) for each in sequences], window, token_ids)
            for kind, window in windows.items()
            if kind in self._kinds
        }
        normed: Tensor | None = self._first_norm(hidden)
        for index, layer in enumerate(self._layers):
            see(index, hidden)
            hidden, normed = layer.run(hidden, present(normed, NO_NORM), batches, states)
        return self._beyond(hidden) if normed is None else normed

    @property
    def recordable(self) -> bool:
        """True if this machine has all layers."""
        return self._next_stage is None and self._layers[-1].next_norm is not None

    def _see(self, layer: int, hidden: Tensor) -> None:
        if self.capture is not None:
            self.capture.see(layer, hidden)

    def _beyond(self, hidden: Tensor) -> Tensor:
        """Run the later stages, if any, and the last norm, if this stage has it."""
        if self._next_stage is not None:
            hidden = self._next_stage(hidden)
        last: Tensor = self._last_norm(hidden)
        return last

    def locate(self, span: BatchSpan, hidden: Tensor) -> LocatedSequence:
        """Locate the rows of a sequence among those of a pass, hidden [T, H]."""
        cache = span.cache
        tables = self._tables.get(cache.number)
        if tables is None:
            tables = self._tables[cache.number] = self._new_tables()
        rows = hidden[span.rows]
        positions = {kind: each.at(cache.length, rows, span.tree) for kind, each in tables.items()}
        return LocatedSequence(span.rows, positions, cache.layers)


Turns = Callable[..., tuple[Tensor, Tensor]]


def cos_and_sin(rotary_emb: Any, kinds: Sequence[str], width: int = 0) -> dict[str, Turns]:
    """Wrap a rotary embedding to return cos and sin as `decoder_ops` takes them, by kind of layer
    where they differ, or of ANY_KIND.

    rotary_emb  None in a model without positions
    width       columns that latent attention would rotate with positions
    """
    name = type(rotary_emb).__name__
    if name in TURNS_BY_KIND:
        return {kind: partial(rotary_emb, layer_type=kind) for kind in sorted(set(kinds))}

    def of_none(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        sin = like.new_zeros(1, position_ids.shape[-1], width)
        return sin + 1, sin

    def of_whole_heads(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_emb(like, position_ids=position_ids)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    def of_rounded(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_emb(like, position_ids=position_ids)
        return cos.to(like.dtype), sin.to(like.dtype)

    def of_complex(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turns = rotary_emb(like, position_ids=position_ids)
        return turns.real.contiguous(), turns.imag.contiguous()

    def of_grids(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_emb(like, position_ids=position_ids.expand(3, 1, -1))
        return cos, sin

    def of_pairs(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (each.chunk(2, -1)[0] for each in rotary_emb(like, position_ids=position_ids))
        return cos.contiguous(), sin.contiguous()

    if rotary_emb is None:
        return {ANY_KIND: of_none}
    for names, turns in (
        (GRID_TURNS, of_grids),
        (COMPLEX_TURNS, of_complex),
        (PAIR_TURNS, of_pairs),
        (HALF_TURNS, of_whole_heads),
        (WIDE_TURNS, of_rounded),
    ):
        if name in names:
            return {ANY_KIND: turns}
    return {ANY_KIND: rotary_emb}


def add_and_norm(hidden: Tensor, update: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return hidden + update, both [T, H], and its norm."""
    if isinstance(norm.forward, FusedNorm) and norm.forward.group is None:
        both: tuple[Tensor, Tensor] = norm(hidden, update)
        return both
    hidden = hidden + update
    return hidden, norm(hidden)


def mix_streams(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the N rows of tokens, [T, N * H], by a gated residual: [T, H], and gates [T, N] by which
    `add_streams` adds what is made of it.
    """
    normed, streams = module.hc_norm(hidden), module.hc_count
    ranked = functional.silu(module.input_mix_weight_down(normed) / streams)
    mixed = decoder_ops.mix_streams(normed, module.input_mix_weight_up(ranked), streams)
    return mixed, module.block_inject_weight(normed)


def fuse_parts(model: Any, family: Family) -> None:
    """Run few rows through fused norms and routers on the CPU, where these are of known kinds."""
    for module in model.modules():
        fuse_norm(module)
    for block in family.moe_blocks(model).values():
        if not fuse_router(block.router, block.gate):
            logger.debug("%s runs as transformers has it", type(block.router).__name__)


def fused_layer(layer: Any, parts: tuple[Any, ...]) -> FusedLayer:
    """Make the fused layer of one of transformers'; parts: of every FusedLayer."""
    name = type(layer).__name__
    if name in GEMMA_LAYERS:
        return FusedGemmaLayer(*parts, layer=layer)
    if name in STREAM_LAYERS:
        return FusedStreamLayer(*parts, layer=layer)
    if name in NORMS_BEHIND:
        mixer, mlp = (getattr(layer, each) for each in NORMS_BEHIND[name])
        return FusedNormedLayer(*parts, behind=(mixer, mlp))
    if name in MULTIPLIED:
        shared = getattr(layer, "shared_mlp", None)
        return FusedMultipliedLayer(*parts, multiplier=layer.residual_multiplier, shared_mlp=shared)
    return FusedLayer(*parts)


def norms_of(layer: Any) -> tuple[nn.Module, ...]:
    """The norms before a decoder layer's mixer and before its feed-forward, or before its only
    part.
    """
    if type(layer).__name__ in NORMED_BEHIND_ALONE | STREAM_LAYERS:
        return nn.Identity(), nn.Identity()
    for names in NORM_NAMES:
        if all(hasattr(layer, name) for name in names):
            return tuple(getattr(layer, name) for name in names)
    raise Broken(f"{type(layer).__name__} has norms of unknown names")


def install_fused_decoder(
    model: Any, family: Family, states: StateShape, kinds: list[str], ahead: bool
) -> None:
    """Run a few tokens of each sequence through the fused decoder on the CPU, if the model's
    attention is of known kinds.

    states, kinds, ahead  as FusedDecoder has them
    """
    own: list[Any] = own_layers(model.model)
    parts = [parts_of(layer, family, states) for layer in own]
    attentions = [each.mixer for each in parts if not each.has_state]
    other = [each for each in attentions if each is not None and not fuse_attention(each)]
    if other:
        logger.debug("%s runs as transformers has it", type(other[0]).__name__)
    else:
        model.model.forward = FusedDecoder(model.model, family, states, kinds, ahead)
