"""A text as a head reads it: the entries of its attention, and what was heard of the text.

Entry i needs the exact model's hidden state of token i, and token i + 1. So what is heard last
waits for the token that follows. Entries behind the root are a draft's, and are forgotten again.
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

# Tokens that wait for their entries, at most, and rows of a pass that makes them.
WAITING = 64
ROWS = 2 * WAITING
UNHEARD = "a head drafts behind a text of which it has heard nothing"


class HeadContext:
    """One text at a time over one head.

    model     whose hidden states are heard; it gives embeddings, and says tokens
    capacity  entries there is room for
    """

    def __init__(self, model: MoEModel, head: DraftHead, capacity: int) -> None:
        self._model, self._head = model, head
        self._naming: ExpertPredictor | None = None
        if isinstance(head, ExpertPredictor) and head.predicted_layers:
            self._naming = head
        kv_shapes = head.shape.kv_shapes
        self.cache = KVCache(1, kv_shapes, capacity, model.dtype, model.device)
        # All tokens that were heard; then those that wait for their entries, and their features.
        self._verified: list[int] = []
        self._tokens: list[int] = []
        self._features: list[Tensor] = []
        # The last token whose entry was made, and its feature: another token may follow it yet.
        self._last: tuple[int, Tensor] | None = None

    @property
    def predicts_experts(self) -> bool:
        return self._naming is not None

    @property
    def verified_count(self) -> int:
        """Tokens of the text whose hidden states were heard."""
        return self.cache.length + len(self._tokens)

    def common_prefix_length(self, token_ids: list[int]) -> int:
        """Entries that a text which begins with these tokens has in common with this one: those of
        the tokens in common, but for the last one, behind which another may follow.
        """
        return max(common_prefix(self._verified, token_ids) - 1, 0)

    @torch.inference_mode()
    def reset(self, count: int = 0, of: "HeadContext | None" = None) -> None:
        """Another text. of: a text over the same head, which may be this one, that knows its first
        `count` tokens.
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
        """The next tokens of the text, and what the exact model hands over of them [T, F]."""
        self._verified += token_ids
        for start in range(0, len(token_ids), WAITING):
            tokens = token_ids[start : start + WAITING]
            self._tokens += tokens
            kept = self._head.kept(features[start : start + WAITING])
            # Rows of their own: the model's next pass may overwrite what it gave.
            self._features.append(kept.clone())
            if len(self._tokens) > WAITING:
                self._write(self._tokens[1:])

    @torch.inference_mode()
    def root(self, pending_id: int) -> HeadState:
        """What follows the text's pending token, whose hidden state nobody knows yet: [1, ...].
        Asked again before more is heard, it makes the last entry anew.
        """
        if not self._tokens:
            token_id, feature = present(self._last, UNHEARD)
            self.cache.rewind(1)
            self._tokens, self._features = [token_id], [feature]
        return self._write([*self._tokens[1:], pending_id]).row(-1)

    def _write(self, following: list[int]) -> HeadState:
        """Make the entries of tokens heard, as far as it is known what follows them."""
        count, start = len(following), self.cache.length
        features = torch.cat(self._features)
        state = self._pass(following, features[:count], start, None)
        self.cache.advance(count)
        self._last = self._tokens[count - 1], features[count - 1 : count]
        self._tokens, self._features = self._tokens[count:], [features[count:]]
        return state

    @torch.inference_mode()
    def node(self, token_id: int, feature: Tensor, tree: Tree | None = None) -> HeadState:
        """What follows a drafted token: [1, ...].

        feature  [1, H] of its parent, by the head itself
        tree     of the nodes so far, whose last one it is; node 0 is the root, and entries of the
                 others lie behind it. None: each follows the one before it
        """
        state = self._pass([token_id], feature, self.cache.length, tree)
        self.cache.advance(1)
        return state

    def forget(self, root: int) -> None:
        """Leave out entries behind the first `root`: those of a draft."""
        self.cache.rewind(self.cache.length - root)

    @torch.inference_mode()
    def next_scores(self, state: HeadState) -> Tensor:
        """Logits [1, V] of the next token, by a state of one row."""
        return self._head.next_scores(state, self._model)

    @torch.inference_mode()
    def after_scores(self, state: HeadState) -> Tensor:
        """Those of the token after the next, of a head that says it."""
        return self._head.after_scores(state, self._model)

    @torch.inference_mode()
    def routes(self, token_id: int, feature: Tensor | None = None) -> list[tuple[int, Route]]:
        """(layer, route) of what a token will want, of a head that names experts.

        feature  [1, H] of the token before it, by the head itself; None: the token is the pending
                 one, of which `root` was asked
        """
        naming = present(self._naming, "a head is asked for experts and names none")
        if feature is None:
            feature = present(self._last, UNHEARD)[1]
        routes = naming.routes(self._head.embedded([token_id], self._model), feature)
        return [*zip(naming.predicted_layers, routes, strict=True)]

    def _pass(
        self, token_ids: list[int], features: Tensor, start: int, tree: Tree | None
    ) -> HeadState:
        """Rows whose entries lie from `start` on, behind one another or the last node of a tree."""
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
        state: HeadState = head.run(head.embedded(token_ids, self._model), features, places, seen)
        return state


def path_slices(tree: Tree, end: int, window: int) -> list[slice]:
    """Entries that the last node of a tree sees: those of the text and of the nodes above it.

    end     where its own entry lies; those of the other nodes lie right before it, in their order
    window  how many it sees at most, itself included
    """
    path = [node for node, seen in enumerate(tree.visible()[-1].tolist()) if seen]
    root = end - (tree.nodes - 1)
    text = max(root - max(window - len(path), 0), 0)
    seen = [slice(text, root)] if window > len(path) and text < root else []
    for node in path[-window:]:
        at = root + node
        if seen and seen[-1].stop == at:
            seen[-1] = slice(seen[-1].start, at + 1)
        else:
            seen.append(slice(at, at + 1))
    return seen
