"""The layer of a checkpoint that predicts tokens ahead (MTP): what it computes.

Entry i takes the exact model's last hidden state f_i, which is normed, and the embedding of token
i + 1, and says token i + 2:

    x = eh_proj [enorm(e(t[i+1])) ; hnorm(f_i)]
    h = a whole decoder layer over x         which may have experts
    tokens   softmax(head last_norm(h))

Families differ in two places (`Predictor`): whether the first entry has 0 for an embedding, and
whether h or last_norm(h) takes the place of f_{i+1}.
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
from speq.models.moe_model import MoEModel
from speq.models.mtp_layer import Predictor


class MtpLayer(nn.Module):
    """Its modules, by the names of `PartNames`.

    decoder, norm, rotary  transformers' classes of the family
    """

    def __init__(
        self, config: Any, predictor: Predictor, decoder: Any, norm: Any, rotary: Any
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
        self.predictor = predictor

    def forward(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> Tensor:
        """As `DraftHead.run`, to what takes the place of the next features [T, H]."""
        if self.predictor.zeroes_first:
            embedded = embedded.masked_fill((places == 0)[:, None], 0)
        pair = torch.cat((self.enorm(embedded), self.hnorm(features)), -1)
        x = self.eh_proj(pair)[None]
        at = places[None]
        if hasattr(self.rotary, "mrope_section"):  # of text, all three kinds of positions are one
            at = at.expand(3, 1, -1)
        hidden: Tensor = self.decoder(
            x,
            attention_mask=seen.mask,
            position_embeddings=self.rotary(x, at),
            use_cache=True,
            **{self._cache_name: seen},
        )
        return self._normed(hidden[0]) if self.predictor.passes_normed else hidden[0]

    def said(self, features: Tensor) -> Tensor:
        """What a head scores, of what `forward` gave."""
        return features if self.predictor.passes_normed else self._normed(features)

    def _normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.last_norm(hidden)
        return normed


@dataclass(frozen=True, slots=True)
class MtpHead:
    """embedding, head  [V, H] of its own; None: those of the exact model"""

    shape: MtpShape
    layer: MtpLayer
    embedding: Tensor | None
    head: Tensor | None

    @property
    def beyond(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes(self.layer.eh_proj.weight.dtype)

    def kept(self, features: Tensor) -> Tensor:
        return features

    def embedded(self, token_ids: list[int], model: MoEModel) -> Tensor:
        if self.embedding is None:
            return model.embed(token_ids)
        return functional.embedding(model.tokens(token_ids), self.embedding)

    def run(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> FeatureState:
        return FeatureState(self.layer(embedded, features, places, seen))

    def next_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        said = self.layer.said(state.feature)
        return model.logits(said) if self.head is None else ops.linear(said, self.head)

    def after_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        raise NotImplementedError("it says one token")
