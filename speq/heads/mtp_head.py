"""A layer behind a model's last that predicts tokens ahead (MTP): what it computes.

Checkpoints of glm4_moe have it under `model.layers.N`, N their number of layers. Entry i takes the
exact model's last hidden state f_i, which is normed, and the embedding of token i + 1, and says
token i + 2. So vLLM has it (vllm/model_executor/models/glm4_moe_mtp.py):

    x = eh_proj [enorm(e(t[i+1])) ; hnorm(f_i)]      the embedding at the first place is 0
    h = a whole decoder layer over x                 with experts; h takes the place of f_{i+1}
    tokens   softmax(head shared_head.norm(h))

SGLang (python/sglang/srt/models/glm4_moe_nextn.py) has the same order. It leaves the first
embedding as it is, and hands on the normed h.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.heads.draft_head import FeatureState, Seen
from speq.heads.mtp_shape import MtpShape
from speq.kernels import ops
from speq.models.moe_model import MoEModel


class MtpLayer(nn.Module):
    """Its modules, by their names on disk where these are not the decoder layer's own.

    decoder, norm, rotary  transformers' classes of the family
    """

    def __init__(self, config: Any, decoder: Any, norm: Any, rotary: Any) -> None:
        super().__init__()
        hidden_size, epsilon = config.hidden_size, config.rms_norm_eps
        self.enorm = norm(hidden_size, epsilon)
        self.hnorm = norm(hidden_size, epsilon)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.decoder = decoder(config, config.num_hidden_layers)
        self.shared_head_norm = norm(hidden_size, epsilon)
        self.rotary = rotary

    def forward(self, embedded: Tensor, features: Tensor, places: Tensor, seen: Seen) -> Tensor:
        """As `DraftHead.run`, to [T, H]."""
        embedded = embedded.masked_fill((places == 0)[:, None], 0)
        pair = torch.cat((self.enorm(embedded), self.hnorm(features)), -1)
        x = self.eh_proj(pair)[None]
        hidden: Tensor = self.decoder(
            x,
            attention_mask=seen.mask,
            past_key_values=seen,
            position_embeddings=self.rotary(x, places[None]),
            use_cache=True,
        )
        return hidden[0]


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

    def run(self, embedded: Tensor, features: Tensor, places: Tensor, seen: Seen) -> FeatureState:
        return FeatureState(self.layer(embedded, features, places, seen))

    def next_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        normed = self.layer.shared_head_norm(state.feature)
        return model.logits(normed) if self.head is None else ops.linear(normed, self.head)

    def after_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        raise NotImplementedError("it says one token")
