"""A published EAGLE-3 head: one Llama layer over the inputs of three layers of the exact model.

Position i takes those features f_i and the embedding of token i + 1, and predicts token i + 2 (Li
et al., arXiv:2503.01840; SafeAILab/EAGLE, eagle/model/cnets.py):

    g = fc f_i                                 or, after a drafted token, the head's own h
    h = g + attention([norm(e(t[i+1])) ; norm(g)])
    h = h + MLP(norm(h))
    tokens   softmax(head norm(h)), of a vocabulary of the head's own
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speq.heads.draft_head import FeatureState, VisibleKV
from speq.heads.eagle_shape import LOOKED_UP, EagleShape
from speq.heads.head_matrix import hold, multiply
from speq.heads.moe_head import rotate
from speq.models.moe_model import MoEModel

# Logit of tokens that the head cannot predict: finite, to differ from a damaged head's, and with
# probability 0 at any temperature.
FAR = -1e9


@dataclass(frozen=True, slots=True)
class EagleHead:
    """An EAGLE-3 head: weights by the names of `EagleShape.tensors`; drafts run matrices in codes.

    said  [draft_vocab_size] int64, the exact model's ids of the head's tokens; None: all tokens
    """

    shape: EagleShape
    weights: Mapping[str, Any]  # Tensor, or HeadMatrix of a loaded head
    said: Tensor | None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Empty: published heads do not state them."""
        return ()

    @property
    def predicts_two(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        said = 0 if self.said is None else self.said.nbytes
        return said + sum(weight.nbytes for weight in self.weights.values())

    def load(self, dtype: torch.dtype, device: torch.device) -> "EagleHead":
        weights = {
            name: weight.to(device, dtype) if name == LOOKED_UP else hold(weight, dtype, device)
            for name, weight in self.weights.items()
        }
        return EagleHead(self.shape, weights, None if self.said is None else self.said.to(device))

    def reduce(self, features: Tensor) -> Tensor:
        return multiply(features.to(self.weights["norm"].dtype), self.weights["fc"])

    def embed(self, token_ids: list[int], model: MoEModel) -> Tensor:
        if self.shape.own_embedding:
            return functional.embedding(model.tokens(token_ids), self.weights["embedding"])
        return model.embed(token_ids)

    def run(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> FeatureState:
        normed = self._norm("feature_norm", features)
        pair = torch.cat((self._norm("embedding_norm", embedded), normed), -1)
        queries, keys, values = self._queries_keys_values(pair, places)
        attended = seen.attend(queries, keys, values)[0].transpose(0, 1).flatten(1)
        around = normed if self.shape.norm_first else features
        hidden = around + multiply(attended, self.weights["output"])
        both = multiply(self._norm("mlp_norm", hidden), self.weights["gate_up"])
        gate, up = both.chunk(2, -1)
        return FeatureState(hidden + multiply(functional.silu(gate) * up, self.weights["down"]))

    def _queries_keys_values(self, pair: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [T, 2H] to queries, keys and values, each [1, heads, T, width]."""
        shape, count = self.shape, len(pair)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        parts = multiply(pair, self.weights["qkv"]).view(1, count, sum(heads), shape.head_width)
        queries, keys, values = parts.transpose(1, 2).split(heads, 1)
        kind = torch.promote_types(pair.dtype, torch.float32)
        frequencies = shape.frequencies.to(places.device, kind)
        angles = places.to(kind)[:, None] * frequencies
        rotation = angles.cos() * shape.turn_scale, angles.sin() * shape.turn_scale
        return rotate(queries, rotation), rotate(keys, rotation), values

    def next_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        normed = self._norm("norm", state.feature)
        if not self.shape.own_head:
            return model.logits(normed)
        scores = multiply(normed, self.weights["head"])
        if self.said is None:
            return scores
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        every = scores.new_full((len(scores), self.shape.vocab_size), FAR)
        return every.index_copy_(1, self.said, scores)

    def after_scores(self, state: FeatureState, model: MoEModel) -> Tensor:
        raise NotImplementedError("the head predicts one token")

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        weight = self.weights[name]
        return functional.rms_norm(rows.to(weight.dtype), weight.shape, weight, self.shape.epsilon)
