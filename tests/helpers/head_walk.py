"""A text as it goes through a head, piece by piece, beside the whole of it at once."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from speq.engine.draft import Draft
from speq.heads.head_context import HeadContext
from speq.models.tree import Tree


class Whole(Protocol):
    """A text at once: what a head makes of the last of some tokens, behind those of a text whose
    features are known.
    """

    def at(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Its feature [H], and its scores [V] of all tokens."""


def assert_pieces_make_the_whole(
    text: HeadContext,
    features: Tensor,
    whole_of: Callable[[Tensor], Whole],
    words: int,
    *,
    chunks: Sequence[int],
    rounds: Sequence[int],
    nodes: int,
    atol: float,
) -> None:
    """Walk a text: its prompt in chunks, then rounds of a chain, a tree, and what was accepted.

    features  [T, F] of the text's tokens, as the exact model hands them over
    whole_of  the same head over the features of all tokens that were heard
    words     tokens are below it
    chunks    where the prompt's chunks end; rounds: how many tokens of each are accepted
    nodes     of a tree; atol: of features and scores, beside a share of 1e-5
    """
    rng = random.Random(5)

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=atol)

    tokens = [rng.randrange(words) for _ in range(chunks[-1])]
    text.reset()
    for start, end in zip((0, *chunks), chunks, strict=False):
        text.observe_verified(tokens[start:end], features[start:end])
    for accepted in rounds:
        heard = len(tokens)
        tokens.append(rng.randrange(words))
        whole = whole_of(features[:heard])
        state = first = text.root(tokens[-1])
        feature, scores = whole.at(tokens)
        close(state.feature, feature)
        close(text.next_scores(state), scores)
        root, drafted = text.cache.length, list[int]()
        for _ in range(2):
            drafted.append(rng.randrange(words))
            state = text.node(drafted[-1], state.feature)
            feature, scores = whole.at(tokens + drafted)
            close(state.feature, feature)
            close(text.next_scores(state), scores)
        text.forget(root)
        draft, states = Draft(), {0: first}
        for node in range(1, nodes + 1):
            draft.token_ids.append(rng.randrange(words))
            draft.parents.append(rng.randrange(node))
            tree = Tree.of(draft.parents, rows=1)
            parent = states[draft.parents[-1]]
            states[node] = text.node(draft.token_ids[-1], parent.feature, tree)
            close(states[node].feature, whole.at(tokens + draft.above(node))[0])
        text.forget(root)
        tokens += [rng.randrange(words) for _ in range(accepted)]
        text.observe_verified(tokens[heard:], features[heard : len(tokens)])
