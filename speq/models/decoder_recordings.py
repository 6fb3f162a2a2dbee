"""Passes of the fused decoder as lists of ops.

A recorded pass runs without the modules that issued its ops: on few rows these take longer than the
ops. Its bits are those of the fused decoder, which is the reference. The host has its part at the
experts of each layer.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from speq.kernels.decoder_ops import Positions
from speq.layers.cut_backend import CutBackend, IssuedExperts, PassedLayer, again
from speq.layers.offloaded_experts import ActiveBackend, ExpertBackend
from speq.models.fused_decoder import FusedDecoder, LocatedSequence
from speq.models.kv_cache import KVCache
from speq.models.op_recorder import OpRecorder, Unrecordable
from speq.models.packed_batch import BatchSpan
from speq.models.states import StateLayer
from speq.routing import Route

logger = logging.getLogger("speq")

# A pass is recorded when it was run so many times: a recording takes as long as some passes.
REPEATS = 2
# Most recordings over a cache, as many as a governor's draft lengths; least recently used go first.
MAX_RECORDINGS = 12


@dataclass(frozen=True, slots=True)
class PassRecording:
    """A recorded pass of T tokens of one sequence.

    inputs    [T, H], the embedded tokens
    turns     cos and sin of their positions, by kind of layer
    captured  inputs of the layers that drafters read, by layer
    result    [T, H], the last hidden states
    """

    recorder: OpRecorder
    experts: "RecordedExperts"
    inputs: Tensor
    turns: dict[str, tuple[Tensor, Tensor]]
    captured: dict[int, Tensor]
    result: Tensor

    def run(self, hidden: Tensor, start: int, positions: Mapping[str, Positions]) -> Tensor:
        """Run the pass. Returns [T, H], which the next run leaves alone."""
        self.inputs.copy_(hidden)
        for kind, (cos, sin) in self.turns.items():
            cos.copy_(positions[kind].cos)
            sin.copy_(positions[kind].sin)
        straight = self.experts.straight
        self.recorder.run(start, straight)
        if straight:
            self.experts.passed(self.recorder.ops.passed())
        return self.result.clone()


class RecordedExperts:
    """The backend of a pass while it is recorded.

    drafts  as the backend's
    """

    def __init__(self, backend: ExpertBackend, recorder: OpRecorder) -> None:
        self._backend, self._recorder = backend, recorder
        self._issued = backend if isinstance(backend, IssuedExperts) else None
        self._cut = CutBackend(backend, recorder.cut)
        # By the number of its gate: a layer, and its route in the recording's buffers.
        self._routes: dict[int, tuple[int, Route]] = {}
        self.drafts = backend.drafts

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        backend, issued = self._backend, self._issued
        if issued is None or not route.topk_ids.is_contiguous():  # a gate reads them as they lie
            return self._cut(layer, hidden_states, route)
        self._recorder.keep(route.topk_ids)
        self._recorder.keep(route.topk_weights)
        output, gate = self._recorder.cut_or_issue(
            lambda: backend(layer, hidden_states, again(route)),
            lambda: issued.issue(layer, hidden_states, route),
            route.topk_ids,
            issued.slot_table(layer),
        )
        self._routes[gate] = layer, route
        return output

    @property
    def straight(self) -> bool:
        return self._issued is not None and self._issued.straight

    def passed(self, gates: list[tuple[int, float, float]]) -> None:
        """Report the layers of a run that passed these gates."""
        if self._issued is None or not gates:
            return
        found = [self._routes[gate] for gate, _, _ in gates]
        ids = torch.stack([route.topk_ids for _, route in found]).unbind()
        weights = torch.stack([route.topk_weights for _, route in found]).unbind()
        self._issued.passed(
            [
                PassedLayer(layer, Route(*tensors), start_s, end_s)
                for (layer, _), tensors, (_, start_s, end_s) in zip(
                    found, zip(ids, weights, strict=True), gates, strict=True
                )
            ]
        )


class RecordedStates:
    """A cache's layers while a pass is recorded: the host moves their states."""

    def __init__(self, layers: Sequence[Any], recorder: OpRecorder) -> None:
        self.layers = [StateCut(layer, recorder) for layer in layers]


class StateCut:
    """Places the work of a layer with a state in a recording; see `StateLayer.run`."""

    def __init__(self, layer: StateLayer, recorder: OpRecorder) -> None:
        self._layer, self._recorder = layer, recorder

    def run(self, rows: Any, parts: Any) -> Tensor:
        layer, output = self._layer, self._layer.output(rows, parts)
        self._recorder.cut(lambda: output.copy_(layer.run(rows, parts)))
        return output


@dataclass(slots=True)
class CacheRecordings:
    """Passes over one KV cache, by backend and number of tokens."""

    runs: dict[tuple[ExpertBackend, int], int] = field(default_factory=dict)
    passes: OrderedDict[tuple[ExpertBackend, int], PassRecording] = field(
        default_factory=OrderedDict
    )


class DecoderRecordings:
    """Runs passes of single sequences by recordings, where there are such.

    The recordings over a cache are freed with it, or by `forget`. If one fails, a debug line says
    why, and no more are made.
    """

    def __init__(self, decoder: FusedDecoder, switch: ActiveBackend) -> None:
        self._decoder, self._switch = decoder, switch
        self._by_cache: WeakKeyDictionary[KVCache, CacheRecordings] = WeakKeyDictionary()
        self._why_not: str | None = None

    @property
    def native_s(self) -> float:
        """Seconds that native ops of the recordings have run."""
        held = [each for kept in self._by_cache.values() for each in kept.passes.values()]
        return sum(each.recorder.ops.ran_s for each in held)

    def forget(self) -> None:
        """Free all recordings, and what they hold: buffers, KV caches and slots."""
        self._by_cache.clear()

    def run(
        self,
        backend: ExpertBackend,
        span: BatchSpan,
        token_ids: Tensor,
        windows: dict[str, int | None],
    ) -> Tensor | None:
        """Run a chain of tokens [1, T] of one sequence. Return their last hidden states [T, H].

        None: the pass is not recorded, and the decoder must run it.
        """
        if self._why_not is not None or span.tree is not None:
            return None
        key = backend, token_ids.shape[1]
        held = self._by_cache.setdefault(span.cache, CacheRecordings())
        recorded = held.passes.get(key)
        if recorded is None:
            held.runs[key] = held.runs.get(key, 0) + 1
            if held.runs[key] <= REPEATS:
                return None
        decoder = self._decoder
        hidden = decoder.embed(token_ids[0])
        located = decoder.locate(span, hidden)
        if recorded is None:
            try:
                recorded = held.passes[key] = self._record(backend, located, hidden, windows)
            except Unrecordable as reason:
                self._why_not = str(reason)
                logger.debug("passes run module by module: %s", reason)
                return None
            if len(held.passes) > MAX_RECORDINGS:
                held.passes.popitem(last=False)
        else:
            held.passes.move_to_end(key)
        result = recorded.run(hidden, span.cache.length, located.positions)
        if decoder.capture is not None:
            for layer, state in recorded.captured.items():
                decoder.capture.see(layer, state)
        return result

    def _record(
        self,
        backend: ExpertBackend,
        located: LocatedSequence,
        hidden: Tensor,
        windows: dict[str, int | None],
    ) -> PassRecording:
        recorder, decoder = OpRecorder(), self._decoder
        inputs = hidden.clone()
        turns = {
            kind: (each.cos.clone(), each.sin.clone()) for kind, each in located.positions.items()
        }
        positions = {
            kind: Positions(each.start, *turns[kind]) for kind, each in located.positions.items()
        }
        sequence = replace(located, positions=positions)
        captured: dict[int, Tensor] = {}

        def see(layer: int, states: Tensor) -> None:
            recorder.next_layer()
            if decoder.capture is not None and decoder.capture.reads(layer):
                kept = captured[layer] = torch.empty_like(states)
                recorder.keep(kept)
                recorder.cut(lambda: kept.copy_(states))

        active, experts = self._switch.backend, RecordedExperts(backend, recorder)
        self._switch.use(experts)
        try:
            with recorder:
                states = RecordedStates(located.layers, recorder)
                result = decoder.walk(inputs, [sequence], windows, states, see)
        finally:
            self._switch.use(active)
        return PassRecording(recorder, experts, inputs, turns, captured, result)
