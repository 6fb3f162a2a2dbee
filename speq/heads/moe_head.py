"""Jakiro's draft head: a layer of two branches over the exact model's last hidden state.

Its position i takes the exact model's last hidden state of token i (the feature f_i) and the
embedding of token i + 1, and predicts token i + 2:

    x = enter [norm(e(t[i+1])) ; norm(f_i)]
    u = x + attention(norm(x))                 over KV of its own
    b_j = u + MLP_j(norm(u))                   two branches
    pi = softmax(gate u)
    next        f = sum_j pi_j b_j             close to f_{i+1}: it takes the place of that
    after next  c = u + s_1 (b_1 - u) - s_2 (b_2 - u), close to f_{i+2}
    tokens      sum_j pi_j softmax(W b_j)      with the model's own head W

Jakiro (paper: Algorithm 1, Eqs. 1 to 11) scales branches by pi_j before W, which only flattens
their logits. Here they are mixed as distributions, and the residual is inside a branch, as in the
authors' own code.

A head may also predict experts: those of token i + 1, in some layers, with the largest

    routes [norm(e(t[i+1])) ; norm(f_i)]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.errors import present
from speq.heads.draft_head import VisibleKV
from speq.heads.head_matrix import HeadMatrix, hold, multiply
from speq.heads.head_shape import ROPE_BASE, HeadShape
from speq.layers.int4_matrix import Int4Matrix
from speq.models.moe_model import MoEModel
from speq.routing import Route, top_experts

EPSILON = 1e-6
# Shares of the two branches in the contrast before training, and their scale: 1.2 and 0.3.
CONTRAST_SHARES, CONTRAST_SCALE = (0.8, 0.2), 1.5
# Attention over queries, keys and values [B, heads, T, width]; output of the queries' shape.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BranchState:
    """Output of a head for rows [...].

    branches  [..., J, H]
    mixing    [..., J] float32, probability that each branch is the right one
    feature   [..., H], used in place of the model's next hidden state
    after     [..., H], used in place of the one after; None for a head without contrast
    """

    branches: Tensor
    mixing: Tensor
    feature: Tensor
    after: Tensor | None

    def row(self, at: int) -> "BranchState":
        """Select one row of [T, ...] as [1, ...]."""
        rows = slice(at, at + 1) if at != -1 else slice(-1, None)
        after = None if self.after is None else self.after[rows]
        return BranchState(self.branches[rows], self.mixing[rows], self.feature[rows], after)


class MoEHead(nn.Module):
    """Weights of the head, and the parts of its pass, in this order: `enter`,
    `queries_keys_values`, attention by the owner of the KV, `leave`.
    """

    def __init__(
        self,
        shape: HeadShape,
        weights: Mapping[str, HeadMatrix],
        acceptance_rates: tuple[float, ...] = (),
    ) -> None:
        """weights  weights by the names of `HeadShape.tensors`, of any float dtype, or matrices in
                 codes, for drafting
        acceptance_rates  by depth, measured in training; empty: unknown
        """
        super().__init__()
        self.shape, self.acceptance_rates = shape, acceptance_rates
        # Names in files have dots, which parameters must not have.
        self._weights = nn.ParameterDict(
            {
                name.replace(".", "-"): nn.Parameter(weight)
                for name, weight in weights.items()
                if isinstance(weight, Tensor)
            }
        )
        self._coded = {name: each for name, each in weights.items() if isinstance(each, Int4Matrix)}

    @classmethod
    def random(cls, shape: HeadShape, seed: int = 0) -> "MoEHead":
        """Initialise float32 weights for training."""
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, HeadMatrix] = {}
        for name, size in shape.tensors():
            if name.endswith("norm"):
                weights[name] = torch.ones(size)
            elif name == "contrast_bias":
                weights[name] = torch.tensor(CONTRAST_SHARES).log()
            else:
                drawn = torch.randn(size, generator=generator)
                weights[name] = drawn * (0.0 if name in ("gate", "contrast") else size[-1] ** -0.5)
        return cls(shape, weights)

    def weight(self, name: str) -> Tensor:
        return self._weights[name.replace(".", "-")]

    def matrix(self, name: str) -> HeadMatrix:
        return self._coded[name] if name in self._coded else self.weight(name)

    def weights(self) -> dict[str, Tensor]:
        """Weights of a head without codes by the names of `HeadShape.tensors`, in their order."""
        return {name: self.weight(name).detach() for name, _ in self.shape.tensors()}

    def load(self, dtype: torch.dtype, device: torch.device) -> "MoEHead":
        """Copy the head for drafting, without gradients."""
        weights = {name: hold(w, dtype, device) for name, w in self.weights().items()}
        return MoEHead(self.shape, weights, self.acceptance_rates).requires_grad_(False)

    @property
    def predicts_two(self) -> bool:
        return self.shape.contrast

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self._weights.values(), *self._coded.values()))

    def enter(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Map embeddings of tokens [..., H] and features of those before them [..., H] to x."""
        return multiply(self._pair(embedded, features), self.matrix("enter"))

    def _pair(self, embedded: Tensor, features: Tensor) -> Tensor:
        pair = (self._norm("embedding", embedded), self._norm("feature", features))
        return torch.cat(pair, dim=-1)

    def queries_keys_values(
        self, x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, T, H] to queries, keys and values, each [B, heads, T, width]; rotation: from
        `rotations`, for T positions.
        """
        shape = self.shape
        parts = multiply(self._norm("attention", x), self.matrix("qkv"))
        parts = parts.unflatten(-1, (3, shape.num_heads, shape.head_width)).permute(2, 0, 3, 1, 4)
        return rotate(parts[0], rotation), rotate(parts[1], rotation), parts[2]

    def leave(self, x: Tensor, seen: Tensor) -> BranchState:
        """Finish rows x [B, T, H] from their attention output [B, heads, T, width]."""
        shape = self.shape
        u = x + multiply(seen.transpose(1, 2).flatten(2), self.matrix("output"))
        normed = self._norm("branch", u)
        added = [self._mlp(branch, normed) for branch in range(shape.branches)]
        branches = u[..., None, :] + torch.stack(added, dim=-2)
        mixing = multiply(u, self.weight("gate")).float().softmax(-1)
        feature = (mixing.to(u.dtype)[..., None] * branches).sum(-2)
        if not shape.contrast:
            return BranchState(branches, mixing, feature, None)
        shares = multiply(u, self.weight("contrast")) + self.weight("contrast_bias")
        shares = CONTRAST_SCALE * shares.float().softmax(-1).to(u.dtype)
        after = u + shares[..., :1] * added[0] - shares[..., 1:] * added[1]
        return BranchState(branches, mixing, feature, after)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> BranchState:
        """Run embeddings and features [B, T, H] of T positions."""
        x = self.enter(embedded, features)
        return self.leave(x, attend(*self.queries_keys_values(x, rotation)))

    def reduce(self, features: Tensor) -> Tensor:
        return features

    def embed(self, token_ids: list[int], model: MoEModel) -> Tensor:
        return model.embed(token_ids)

    def run(
        self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV
    ) -> BranchState:
        rotation = rotations(places, self.shape.head_width, embedded.dtype)
        state: BranchState = self(embedded[None], features[None], rotation, seen.attend)
        after = None if state.after is None else state.after[0]
        return BranchState(state.branches[0], state.mixing[0], state.feature[0], after)

    def next_scores(self, state: BranchState, model: MoEModel) -> Tensor:
        """Log-probabilities of the mixture."""
        return mix_logits(state.mixing, model.logits(state.branches))

    def after_scores(self, state: BranchState, model: MoEModel) -> Tensor:
        after = present(
            state.after, "a head without contrast was asked for the token after the next"
        )
        return model.logits(after)

    @property
    def predicted_layers(self) -> tuple[int, ...]:
        return () if self.shape.named is None else self.shape.named.layers

    def routes(self, embedded: Tensor, features: Tensor) -> list[Route]:
        top_k = present(
            self.shape.named, "a head that predicts no experts was asked for them"
        ).top_k
        logits = self.route_logits(embedded, features, self.weight("routes"))
        ids, margins = top_experts(logits.flatten(0, 1), top_k)
        # Numbers of experts are exact in float32, and one piece is read from a device in one go.
        read = torch.stack((ids.float(), margins)).cpu().unflatten(1, logits.shape[:2])
        even = torch.full(read.shape[2:], 1 / top_k)
        return [
            Route(experts.long(), even, margins=behind.tolist())
            for experts, behind in zip(*read, strict=True)
        ]

    def route_logits(self, embedded: Tensor, features: Tensor, weight: Tensor) -> Tensor:
        """Router logits [L, T, E] of rows [T, H], by weights [L, E, 2H] of the head's dtype."""
        logits = multiply(self._pair(embedded, features), weight.flatten(0, 1))
        return logits.unflatten(1, weight.shape[:2]).transpose(0, 1)

    def _mlp(self, branch: int, normed: Tensor) -> Tensor:
        both = multiply(normed, self.matrix(f"gate_up.{branch}"))
        gate, up = both.chunk(2, dim=-1)
        return multiply(functional.silu(gate) * up, self.matrix(f"down.{branch}"))

    def _norm(self, what: str, rows: Tensor) -> Tensor:
        weight = self.weight(f"{what}_norm")
        return functional.rms_norm(rows.to(weight.dtype), weight.shape, weight, EPSILON)


def rotations(
    positions: Tensor, head_width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, width / 2] of positions [T], in float32 or wider."""
    kind = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_width, 2, device=positions.device, dtype=kind)
    angles = positions.to(kind)[:, None] * ROPE_BASE ** (-steps / head_width)
    return angles.cos(), angles.sin()


def rotate(rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings to rows [..., T, width], on halves."""
    cos, sin = rotation
    first, second = rows.to(cos.dtype).chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return both.to(rows.dtype)


def mix_logits(mixing: Tensor, logits: Tensor) -> Tensor:
    """Log-probabilities [..., V] of the mixture of branches.

    mixing  [..., J]; logits: [..., J, V] of the branches, of any float dtype
    """
    kind = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(kind).log_softmax(-1) + mixing.to(kind).log()[..., None]).logsumexp(-2)
