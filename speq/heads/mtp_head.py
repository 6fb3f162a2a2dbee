"""Computation of the MTP layer of a checkpoint.

Position i takes the exact model's last hidden state f_i, which is normed, and the embedding of
token i + 1, and predicts token i + 2:

    x = eh_proj [enorm(e(t[i+1])) ; hnorm(f_i)]
    h = a whole decoder layer over x         which may have experts
    tokens   softmax(head last_norm(h))

Families differ in two places (`MtpLayerKind`): whether the first position has embedding 0, and
whether h or last_norm(h) replaces f_{i+1}.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.heads.draft_head import FeatureState, VisibleKV
from speq.heads.mtp_shape import MtpShape
from speq.kernels import ops
from speq.layers.arguments import cache_name
from speq.layers.fused_attention import TURNS_BY_KIND
from speq.models.moe_model import MoEModel
from speq.models.mtp_layer import MtpLayerKind


class MtpLayer(nn.Module):
    """Modules of the MTP layer, by the names of `PartNames`.

    decoder, norm, rotary  transformers' classes of the family
    """

    def __init__(
        self, config: Any, predictor: MtpLayerKind, decoder: Any, norm: Any, rotary: Any
    ) -> None:
        super().__init__()
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.enorm = norm(hidden_size, epsilon)
        self.hnorm = norm(hidden_size, epsilon)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.decoder = decoder(config, config.num_hidden_layers)
        self._cache_name = cache_name(decoder.forward)
        self.last_norm = norm(hidden_size, epsilon)
        self.rotary = rotary
        # Arguments of rotary embeddings that differ between kinds of layers.
        self._turns = {}
        if type(rotary).__name__ in TURNS_BY_KIND:
            self._turns["layer_type"] = config.layer_types[config.num_hidden_layers]
        self.predictor = predictor

    def forward(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> Tensor:
        """Run rows as `DraftHead.run` does. Return [T, H], used in place of the next features."""
        if self.predictor.zeroes_first:
            embedded = embedded.masked_fill((places == 0)[:, None], 0)
        pair = torch.cat((self.enorm(embedded), self.hnorm(features)), -1)
        x = self.eh_proj(pair)[None]
        at = places[None]
        if hasattr(self.rotary, "mrope_section"):  # for text, the three positions are equal
            at = at.expand(3, 1, -1)
        hidden: Tensor = self.decoder(
            x,
            attention_mask=seen.mask,
            position_embeddings=self.rotary(x, at, **self._turns),
            use_cache=True,
            **{self._cache_name: seen},
        )
        return self._norm(hidden[0]) if self.predictor.passes_normed else hidden[0]

    def scored(self, features: Tensor) -> Tensor:
        """Input of the output head, from the output of `forward`."""
        return features if self.predictor.passes_normed else self._norm(features)

    def _norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.last_norm(hidden)
        return normed


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A loaded MTP layer. embedding, head: [V, H] of its own; None: the exact model's."""

    shape: MtpShape
    layer: MtpLayer
    embedding: Tensor | None
    head: Tensor | None

    @property
    def predicts_two(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes(self.layer.eh_proj.weight.dtype)

    def reduce(self, features: Tensor) -> Tensor:
        return features

    def embed(self, token_ids: list[int], model: MoEModel) -> Tensor:
        if self.embedding is None:
            return model.embed(token_ids)
        return functional.embedding(model.tokens(token_ids), self.embedding)

    def run(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> FeatureState:
        return FeatureState(self.layer(embedded, features, places, seen))

    def next_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        said = self.layer.scored(state.feature)
        return model.logits(said) if self.head is None else ops.linear(said, self.head)

    def after_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        raise NotImplementedError("the head predicts one token")
