"""A head's view of a sequence: the KV of its attention, and the verified tokens and features.

Position i needs the exact model's hidden state of token i, and token i + 1. So the last features
wait for the token that follows. KV after the root belongs to a draft and is dropped again.
"""

from typing import Any

import torch
from torch import Tensor

from speq.errors import present
from speq.heads.draft_head import DraftHead, ExpertPredictor, HeadState, VisibleKV
from speq.models.kv_cache import KVCache, causal_mask, common_prefix
from speq.models.moe_model import MoEModel
from speq.models.tree import Tree
from speq.routing import Route

# Most tokens that wait for their KV, and rows of the pass that computes it.
WAITING = 64
ROWS = 2 * WAITING
UNHEARD = "a head drafts after a sequence whose features it has not observed"


class HeadContext:
    """A head's cache of one sequence at a time.

    model     the exact model; it provides embeddings and the output head
    capacity  most cached tokens
    """

    def __init__(self, model: MoEModel, head: DraftHead, capacity: int) -> None:
        self._model, self._head = model, head
        self._naming: ExpertPredictor | None = None
        if isinstance(head, ExpertPredictor) and head.predicted_layers:
            self._naming = head
        kv_shapes = head.shape.kv_shapes
        self.cache = KVCache(1, kv_shapes, capacity, model.dtype, model.device)
        # All verified tokens; then those that wait for their KV, and their features.
        self._verified: list[int] = []
        self._tokens: list[int] = []
        self._features: list[Tensor] = []
        # The last token with KV, and its feature: another token may still follow it.
        self._last: tuple[int, Tensor] | None = None

    @property
    def predicts_experts(self) -> bool:
        return self._naming is not None

    @property
    def verified_count(self) -> int:
        """Tokens of the sequence whose features were observed."""
        return self.cache.length + len(self._tokens)

    def common_prefix_length(self, token_ids: list[int]) -> int:
        """Cached tokens that a sequence with these first tokens can reuse: those in common except
        the last one, which another token may follow.
        """
        return max(common_prefix(self._verified, token_ids) - 1, 0)

    @torch.inference_mode()
    def reset(self, count: int = 0, of: "HeadContext | None" = None) -> None:
        """Begin another sequence.

        of  a context of the same head, possibly this one, that has the sequence's first `count`
            tokens
        """
        of = of or self
        if count > of.cache.length:
            of._write(of._tokens[1:])
        if of is self:
            self.cache.length = count
        else:
            self.cache.take(of.cache, count)
        self._verified = of._verified[:count]
        self._tokens, self._features, self._last = [], [], None

    @torch.inference_mode()
    def observe_verified(self, token_ids: list[int], features: Tensor) -> None:
        """Add the next tokens of the sequence and their features [T, F] from the exact model."""
        self._verified += token_ids
        for start in range(0, len(token_ids), WAITING):
            tokens = token_ids[start : start + WAITING]
            self._tokens += tokens
            kept = self._head.reduce(features[start : start + WAITING])
            # A copy: the model's next pass may overwrite its features.
            self._features.append(kept.clone())
            if len(self._tokens) > WAITING:
                self._write(self._tokens[1:])

    @torch.inference_mode()
    def root(self, pending_id: int) -> HeadState:
        """State [1, ...] after the sequence's pending token, whose hidden state is not known yet.
        If called again before more is observed, it recomputes the last KV.
        """
        if not self._tokens:
            token_id, feature = present(self._last, UNHEARD)
            self.cache.rewind(1)
            self._tokens, self._features = [token_id], [feature]
        return self._write([*self._tokens[1:], pending_id]).row(-1)

    def _write(self, following: list[int]) -> HeadState:
        """Compute the KV of observed tokens whose next token is known."""
        count, start = len(following), self.cache.length
        features = torch.cat(self._features)
        state = self._pass(following, features[:count], start, None)
        self.cache.advance(count)
        self._last = self._tokens[count - 1], features[count - 1 : count]
        self._tokens, self._features = self._tokens[count:], [features[count:]]
        return state

    @torch.inference_mode()
    def node(self, token_id: int, feature: Tensor, tree: Tree | None = None) -> HeadState:
        """State [1, ...] after a drafted token.

        feature  [1, H] of its parent, computed by the head
        tree     of the nodes so far, of which it is the last; node 0 is the root, and the KV of the
                 others follows. None: a chain
        """
        state = self._pass([token_id], feature, self.cache.length, tree)
        self.cache.advance(1)
        return state

    def forget(self, root: int) -> None:
        """Drop the KV after the first `root` tokens, which is a draft's."""
        self.cache.rewind(self.cache.length - root)

    @torch.inference_mode()
    def next_scores(self, state: HeadState) -> Tensor:
        """Logits [1, V] of the next token, from a state of one row."""
        return self._head.next_scores(state, self._model)

    @torch.inference_mode()
    def after_scores(self, state: HeadState) -> Tensor:
        """Logits of the token after the next, from a head that predicts it."""
        return self._head.after_scores(state, self._model)

    @torch.inference_mode()
    def routes(self, token_id: int, feature: Tensor | None = None) -> list[tuple[int, Route]]:
        """Predict the routes (layer, route) of a token, with a head that predicts experts.

        feature  [1, H] of the token before it, computed by the head; None: the token is the pending
                 one, for which `root` was called
        """
        naming = present(self._naming, "a head that predicts no experts was asked for them")
        if feature is None:
            feature = present(self._last, UNHEARD)[1]
        routes = naming.routes(self._head.embed([token_id], self._model), feature)
        return [*zip(naming.predicted_layers, routes, strict=True)]

    def _pass(
        self, token_ids: list[int], features: Tensor, start: int, tree: Tree | None
    ) -> HeadState:
        """Run rows whose KV is written from `start` on: a chain, or the last node of a tree."""
        head, count = self._head, len(token_ids)
        window = head.shape.window or self.cache.capacity
        position = start
        if tree is not None:
            position = start - (tree.nodes - 1) + tree.depths()[-1]
        places = torch.arange(position, position + count, device=self._model.device)
        layer: Any = self.cache.layers[0]
        if count > 1:
            seen = VisibleKV(layer, mask=causal_mask(places[None], start + count, window))
        elif tree is not None:
            seen = VisibleKV(layer, slices=path_slices(tree, start, window))
        else:
            seen = VisibleKV(layer, slices=[slice(max(position + 1 - window, 0), start + 1)])
        state: HeadState = head.run(head.embed(token_ids, self._model), features, places, seen)
        return state


def path_slices(tree: Tree, end: int, window: int) -> list[slice]:
    """KV that the last node of a tree sees: the sequence's and its ancestors'.

    end     position of its own KV; that of the other nodes is right before it, in node order
    window  most tokens it sees, itself included
    """
    path = [node for node, seen in enumerate(tree.visible()[-1].tolist()) if seen]
    root = end - (tree.nodes - 1)
    first = max(root - max(window - len(path), 0), 0)
    seen = [slice(first, root)] if window > len(path) and first < root else []
    for node in path[-window:]:
        at = root + node
        if seen and seen[-1].stop == at:
            seen[-1] = slice(seen[-1].start, at + 1)
        else:
            seen.append(slice(at, at + 1))
    return seen
