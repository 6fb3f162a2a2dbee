"""Passes of the fused decoder as lists of ops.

A recorded pass runs without the modules that issued its ops: on few rows these take longer than the
ops. Its bits are those of the fused decoder, which is the reference. The host has its part at the
experts of each layer.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from speq.kernels.decoder_ops import Positions
from speq.kernels.op_list import OpList
from speq.layers.cut_backend import CutBackend, IssuedExperts, PassedLayer, again
from speq.layers.offloaded_experts import ActiveBackend, ExpertBackend
from speq.models.fused_decoder import FusedDecoder, LocatedSequence
from speq.models.kv_cache import KVCache, KVLayer
from speq.models.op_recorder import OpRecorder, Unrecordable
from speq.models.packed_batch import BatchSpan, states_of
from speq.models.states import StateLayer
from speq.routing import Route

logger = logging.getLogger("speq")

# A pass is recorded when it was run so many times: a recording takes as long as some passes.
REPEATS = 2
# Most recordings over a cache, as many as a governor's draft lengths, and over all caches. Least
# recently used go first, and only those that were not run in so many passes: a batch has more
# shapes than this.
MAX_RECORDINGS, MAX_IN_ALL = 12, 24
IDLE_PASSES = 100
# Most shapes of passes that are counted before they are recorded.
MAX_COUNTED = 1000


class SequenceShape(NamedTuple):
    """What a recording fixes of a sequence: its cache, its tokens in the pass, and the nodes of
    their tree, if there is one.
    """

    cache: ref[KVCache]
    tokens: int
    nodes: int | None

    @classmethod
    def of(cls, span: BatchSpan) -> "SequenceShape":
        nodes = None if span.tree is None else span.tree.nodes
        return cls(ref(span.cache), span.last - span.first, nodes)


PassShape = tuple[ExpertBackend, tuple[SequenceShape, ...]]


@dataclass(frozen=True, slots=True)
class PassRecording:
    """A recorded pass of T tokens.

    token_ids  [T]
    inputs     [T, H], the embedded tokens
    sequences  in the pass's buffers; in place of its start each position has its sequence's number
    captured   inputs of the layers that drafters read, by layer
    result     [T, H], the last hidden states
    """

    recorder: OpRecorder
    experts: "RecordedExperts"
    token_ids: Tensor
    inputs: Tensor
    sequences: list[LocatedSequence]
    captured: dict[int, Tensor]
    result: Tensor

    def run(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        starts: Sequence[int],
        sequences: Sequence[LocatedSequence],
    ) -> Tensor:
        """Run the pass. Returns [T, H], which the next run leaves alone."""
        self.token_ids.copy_(token_ids)
        self.inputs.copy_(hidden)
        for buffers, located in zip(self.sequences, sequences, strict=True):
            for kind, buffer in buffers.positions.items():
                given = located.positions[kind]
                buffer.cos.copy_(given.cos)
                buffer.sin.copy_(given.sin)
                if buffer.query_scale is not None and given.query_scale is not None:
                    buffer.query_scale.copy_(given.query_scale)
                if buffer.parents is not None and given.parents is not None:
                    buffer.parents.copy_(given.parents)
        straight = self.experts.straight
        self.experts.passed.begin()
        self.recorder.run(starts, straight)
        self.experts.passed.report()
        return self.result.clone()


def in_buffers(located: LocatedSequence, number: int, recorder: OpRecorder) -> LocatedSequence:
    """A sequence whose positions and choices are in buffers of their own, for a recording."""
    rows, layers, chosen = located.rows, [*located.layers], torch.empty(0)
    for at, layer in enumerate(layers):
        if getattr(layer, "index_keys", None) is not None:
            if not len(chosen):
                shape = rows.stop - rows.start, layer.get_max_length()
                chosen = torch.ones(shape, dtype=torch.bool)
            layers[at] = ChoiceCut(layer, chosen, recorder)
    positions = {
        kind: Positions(
            number,
            each.cos.clone(),
            each.sin.clone(),
            None if each.parents is None else each.parents.clone(),
            None if each.query_scale is None else each.query_scale.clone(),
        )
        for kind, each in located.positions.items()
    }
    return replace(located, positions=positions, layers=layers)


class ChoiceCut:
    """Places the choices of a layer's indexer in a recording; see `KVLayer.choose`.

    chosen  [T, C] bool: where they lie until the next indexer chooses
    """

    def __init__(self, layer: KVLayer, chosen: Tensor, recorder: OpRecorder) -> None:
        self._layer, self._chosen, self._recorder = layer, chosen, recorder
        self.row = layer.row

    def choose(self, indexer: Any, positions: Positions, *rows: Tensor) -> Tensor:
        layer, chosen = self._layer, self._chosen

        def part() -> None:
            made = layer.choose(indexer, positions, *rows)
            seen = chosen[:, : layer.length.count + len(chosen)]
            seen.fill_(True) if made is None else seen.copy_(made)

        self._recorder.cut(part)
        return chosen


class RecordedExperts:
    """The backend of a pass while it is recorded.

    drafts  as the backend's
    """

    def __init__(self, backend: ExpertBackend, recorder: OpRecorder) -> None:
        self._backend, self._recorder = backend, recorder
        self._issued = backend if isinstance(backend, IssuedExperts) else None
        self._cut = CutBackend(backend, recorder.cut)
        self.passed = PassedGates(recorder.ops, self._issued)
        self.drafts = backend.drafts

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        # No reference to this object, which the recording holds: that would be a cycle.
        backend, issued, passed = self._backend, self._issued, self.passed
        if issued is None or not route.topk_ids.is_contiguous():  # a gate reads them as they lie
            return self._cut(layer, hidden_states, route)
        self._recorder.keep(route.topk_ids)
        self._recorder.keep(route.topk_weights)

        def serve() -> Tensor:
            passed.report()
            return backend(layer, hidden_states, again(route))

        output, gate = self._recorder.cut_or_issue(
            serve,
            lambda: issued.issue(layer, hidden_states, route),
            route.topk_ids,
            issued.slot_table(layer),
        )
        passed.routes[gate] = layer, route
        return output

    @property
    def straight(self) -> bool:
        return self._issued is not None and self._issued.straight


class PassedGates:
    """Reports the layers that a run passes without the host, before the host serves another.

    routes  by the number of its gate: a layer, and its route in the recording's buffers
    """

    def __init__(self, ops: OpList, issued: IssuedExperts | None) -> None:
        self._ops, self._issued = ops, issued
        self.routes: dict[int, tuple[int, Route]] = {}
        self._reported = 0

    def begin(self) -> None:
        """A run begins."""
        self._reported = 0

    def report(self) -> None:
        """Report the layers that were passed since the last report."""
        gates = self._ops.passed(self._reported)
        if self._issued is None or not gates:
            return
        self._reported += len(gates)
        found = [self.routes[gate] for gate, _, _ in gates]
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

    def __getattr__(self, name: str) -> "StateCut":
        """The same of a part of the layer's cache."""
        return StateCut(getattr(self._layer, name), self._recorder)

    def run(self, rows: Any, parts: Any) -> Tensor:
        layer, output = self._layer, self._layer.output(rows, parts)
        self._recorder.cut(lambda: output.copy_(layer.run(rows, parts)))
        return output


@dataclass(slots=True)
class CacheRecordings:
    """Passes whose first sequence lies in one KV cache.

    counts  passes that were run without a recording
    passes  least recently used first, and the number of the last run of each among all runs
    """

    counts: Counter[PassShape] = field(default_factory=Counter)
    passes: OrderedDict[PassShape, tuple[PassRecording, int]] = field(default_factory=OrderedDict)

    def find(self, shape: PassShape, ran: int) -> PassRecording | None:
        """The recording of a pass that is to be run now, as run `ran`, if there is one."""
        if shape not in self.passes:
            return None
        recorded, _ = self.passes.pop(shape)
        self.passes[shape] = recorded, ran
        return recorded

    def is_frequent(self, shape: PassShape) -> bool:
        """True if a pass has run often enough to be recorded. It is counted."""
        if len(self.counts) > MAX_COUNTED:
            self.counts.clear()
        self.counts[shape] += 1
        return self.counts[shape] > REPEATS

    @property
    def last_ran(self) -> int:
        """Number of the last run of the recording that was used longest ago."""
        _, last = next(iter(self.passes.values()))
        return last


class DecoderRecordings:
    """Runs passes by recordings, where there are such.

    Recordings are freed with the cache of their first sequence, or by `forget`. If one fails, a
    debug line says why, and no more are made.
    """

    def __init__(self, decoder: FusedDecoder, switch: ActiveBackend) -> None:
        self._decoder, self._switch = decoder, switch
        self._by_cache: WeakKeyDictionary[KVCache, CacheRecordings] = WeakKeyDictionary()
        self._why_not: str | None = None
        self._ran = 0

    @property
    def native_s(self) -> float:
        """Seconds that native ops of the recordings have run."""
        held = [each for kept in self._by_cache.values() for each, _ in kept.passes.values()]
        return sum(each.recorder.ops.ran_s for each in held)

    def forget(self) -> None:
        """Free all recordings, and what they hold: buffers, KV caches and slots."""
        self._by_cache.clear()

    def run(
        self,
        backend: ExpertBackend,
        spans: Sequence[BatchSpan],
        token_ids: Tensor,
        windows: dict[str, int | None],
    ) -> Tensor | None:
        """Run tokens [1, T] of a batch. Return their last hidden states [T, H].

        None: the pass is not recorded, and the decoder must run it.
        """
        if self._why_not is not None:
            return None
        shape = backend, tuple(SequenceShape.of(span) for span in spans)
        held = self._by_cache.setdefault(spans[0].cache, CacheRecordings())
        self._ran += 1
        recorded = held.find(shape, self._ran)
        if recorded is None and not (held.is_frequent(shape) and self._make_room(held)):
            return None
        decoder = self._decoder
        token_ids = token_ids[0]
        hidden = decoder.embed(token_ids)
        sequences = [decoder.locate(span, hidden) for span in spans]
        if recorded is None:
            try:
                recorded = self._record(backend, spans, sequences, token_ids, hidden, windows)
            except Unrecordable as reason:
                self._why_not = str(reason)
                logger.debug("passes run module by module: %s", reason)
                return None
            del held.counts[shape]
            held.passes[shape] = recorded, self._ran
        starts = [span.cache.length for span in spans]
        result = recorded.run(token_ids, hidden, starts, sequences)
        if decoder.capture is not None:
            for layer, state in recorded.captured.items():
                decoder.capture.see(layer, state)
        return result

    def _make_room(self, held: CacheRecordings) -> bool:
        """Have room for one more recording over a cache; False if all others are in use."""
        kept = [each for each in self._by_cache.values() if each.passes]
        full = held if len(held.passes) == MAX_RECORDINGS else None
        if full is None and sum(len(each.passes) for each in kept) >= MAX_IN_ALL:
            full = min(kept, key=lambda each: each.last_ran)
        if full is None:
            return True
        if self._ran - full.last_ran <= IDLE_PASSES:
            return False
        full.passes.popitem(last=False)
        return True

    def _record(
        self,
        backend: ExpertBackend,
        spans: Sequence[BatchSpan],
        located: Sequence[LocatedSequence],
        token_ids: Tensor,
        hidden: Tensor,
        windows: dict[str, int | None],
    ) -> PassRecording:
        recorder, decoder = OpRecorder(), self._decoder
        token_ids, inputs = token_ids.clone(), hidden.clone()
        sequences = [in_buffers(each, number, recorder) for number, each in enumerate(located)]
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
                states = RecordedStates(states_of(spans).layers, recorder)
                result = decoder.walk(token_ids, inputs, sequences, windows, states, see)
        finally:
            self._switch.use(active)
        return PassRecording(recorder, experts, token_ids, inputs, sequences, captured, result)
