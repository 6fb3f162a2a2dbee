"""Verification passes with the exact experts: launched kernel by kernel, or replayed from graphs.

In each layer the host reads the router's choice and loads the experts. So a recorded graph ends
before a layer's experts, and the next one begins after them.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from speq.devices.device import Accelerator, Cut
from speq.layers.cut_backend import CutBackend
from speq.layers.offloaded_experts import ExpertBackend
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, Scored
from speq.models.packed_batch import SequenceTokens
from speq.models.recorded import RecordedPasses


class Verification(Protocol):
    def score(self, batch: Sequence[SequenceTokens]) -> list[Scored]:
        """Score the pending tokens and drafts of a batch in one pass.

        Their KV is written after each cache's length, which does not change. The next pass may
        overwrite the result.
        """


class EagerVerification:
    """Launches kernel by kernel."""

    def __init__(self, model: MoEModel, backend: ExpertBackend) -> None:
        self._model, self._backend = model, backend

    def score(self, batch: Sequence[SequenceTokens]) -> list[Scored]:
        model, backend = self._model, self._backend
        hidden = model.forward(backend, batch)[0]
        counts = [len(each.token_ids) for each in batch]
        found = model.logits(hidden, backend), model.features(hidden)
        by_sequence = zip(*(rows.split(counts) for rows in found), strict=True)
        return [Scored(*each) for each in by_sequence]


class Scoring:
    """Computes logits [T, V] and features for drafters [T, F]."""

    def __init__(self, model: MoEModel, cache: KVCache, backend: ExpertBackend) -> None:
        self._model, self._cache, self._backend = model, cache, backend

    def __call__(
        self, token_ids: Tensor, positions: Tensor, seen: int, cut: Cut
    ) -> tuple[Tensor, Tensor]:
        backend = CutBackend(self._backend, cut)
        hidden = self._model.forward_at(backend, self._cache, token_ids, positions, seen)[0]
        return self._model.logits(hidden), self._model.features(hidden)


class RecordedVerification:
    """Launches the pieces of a graph between calls of the experts.

    Trees, several sequences, and a sequence with another cache are launched kernel by kernel.
    """

    def __init__(
        self, model: MoEModel, cache: KVCache, backend: ExpertBackend, device: Accelerator
    ) -> None:
        self._eager, self._cache = EagerVerification(model, backend), cache
        compute = Scoring(model, cache, backend)
        self.passes = RecordedPasses("verifications", device, cache, compute)

    def score(self, batch: Sequence[SequenceTokens]) -> list[Scored]:
        first = batch[0]
        results = None
        if len(batch) == 1 and first.cache is self._cache and first.is_chain:
            results = self.passes.run(first.token_ids)
        return self._eager.score(batch) if results is None else [Scored(*results)]


def verification_over(
    model: MoEModel, cache: KVCache, backend: ExpertBackend, graphs_on: Accelerator | None
) -> Verification:
    """Make a verification. graphs_on: device to record passes on; None: they are launched"""
    if graphs_on is None:
        return EagerVerification(model, backend)
    return RecordedVerification(model, cache, backend, graphs_on)
