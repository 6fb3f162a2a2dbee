"""The pass that scores a draft with the exact experts: launched kernel by kernel, or recorded.

The host has its part in it: it learns what each layer's router chose and sees that those experts
are in slots. So what is recorded ends where a layer's experts are asked for, and goes on behind
them.
"""

from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speq.decode.sequence import Draft
from speq.devices.device import Accelerator, Cut
from speq.layers.offloaded_experts import ExpertBank
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, Scored
from speq.models.recorded import RecordedPasses
from speq.models.texts import TextTokens
from speq.routing import Route


class Verification(Protocol):
    def score(self, pending_id: int, draft: Draft) -> Scored:
        """Score the pending token and all of a draft's, of the text whose cache this was made over.
        Their entries are written behind the cache's length, which stays as it is. The next pass
        may overwrite the result.
        """

    def score_texts(self, texts: list[TextTokens]) -> list[Scored]:
        """The same for the drafts of any texts, in one pass, which is never recorded."""


class EagerVerification:
    """Launches kernel by kernel."""

    def __init__(self, model: MoEModel, cache: KVCache, bank: ExpertBank) -> None:
        self._model, self._cache, self._bank = model, cache, bank

    def score(self, pending_id: int, draft: Draft) -> Scored:
        token_ids = [pending_id, *draft.token_ids]
        return self._model.score(self._bank, self._cache, token_ids, draft.tree)

    def score_texts(self, texts: list[TextTokens]) -> list[Scored]:
        return self._model.score_texts(self._bank, texts)


class CutBank:
    """Experts that the host runs between the pieces of a graph."""

    drafts: ClassVar[bool] = False

    def __init__(self, bank: ExpertBank, cut: Cut) -> None:
        self._bank, self._cut = bank, cut

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        # No part of this object, which would hold on to the graph that it is held by.
        bank, output = self._bank, torch.empty_like(hidden_states)

        def serve() -> None:
            # A new route for each time: it is kept, and told of by what the host knows of it.
            output.copy_(bank(layer, hidden_states, replace(route)))

        self._cut(serve)
        return output


class Scoring:
    """Computes logits [T, V] and what drafters go by [T, F]."""

    def __init__(self, model: MoEModel, cache: KVCache, bank: ExpertBank) -> None:
        self._model, self._cache, self._bank = model, cache, bank

    def __call__(
        self, token_ids: Tensor, positions: Tensor, seen: int, cut: Cut
    ) -> tuple[Tensor, Tensor]:
        bank = CutBank(self._bank, cut)
        hidden = self._model.forward_at(bank, self._cache, token_ids, positions, seen)[0]
        return self._model.logits(hidden), self._model.features(hidden)


class RecordedVerification:
    """Launches the pieces of a graph between calls of the experts. Trees are launched as a whole
    pass, kernel by kernel.
    """

    def __init__(
        self, model: MoEModel, cache: KVCache, bank: ExpertBank, device: Accelerator
    ) -> None:
        self._eager = EagerVerification(model, cache, bank)
        compute = Scoring(model, cache, bank)
        self.passes = RecordedPasses("verifications", device, cache, compute)

    def score(self, pending_id: int, draft: Draft) -> Scored:
        results = None
        if draft.is_chain:
            results = self.passes.run([pending_id, *draft.token_ids])
        return self._eager.score(pending_id, draft) if results is None else Scored(*results)

    def score_texts(self, texts: list[TextTokens]) -> list[Scored]:
        return self._eager.score_texts(texts)


def verification_over(
    model: MoEModel, cache: KVCache, bank: ExpertBank, graphs_on: Accelerator | None
) -> Verification:
    """graphs_on: the device that passes are recorded on; None: they are launched."""
    if graphs_on is None:
        return EagerVerification(model, cache, bank)
    return RecordedVerification(model, cache, bank, graphs_on)
