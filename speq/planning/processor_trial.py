"""Surveys a processor for a model, in some tenths of a second, before anything is loaded."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from speq.errors import present
from speq.experts.codec import ExpertCodec, ExpertShape, Matrices, codec_of
from speq.experts.expert_store import expert_slot
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.experts.random_expert import random_expert
from speq.files.alignment import allocate_aligned
from speq.kernels import ops
from speq.kernels.grouping import Grouping
from speq.models.opened import Opened
from speq.models.shape import ModelShape
from speq.planning.cost.presets import LAYER_S, MEMORY_SHARE
from speq.planning.cost.survey import Survey
from speq.planning.layer_trial import PassTimes, layer_bytes, passes_s
from speq.planning.link_trial import LinkRates, link_bytes_per_s
from speq.units import Clock

logger = logging.getLogger("speq")

# Of a plain read of memory: at most, and at least.
MEMORY_BYTES, LEAST_MEMORY_BYTES = 192 << 20, 1 << 20
# An expert that is encoded and run has at most so many bytes of words: a narrower one will do.
EXPERT_BYTES = 1 << 20
# What Python takes of a layer for its experts (routes, slots, launches), beside the layer's own
# modules; and for each miss (slots, tickets, threads), as a share of the same. Both are from the
# bundled model, whose time is Python's alone. A draft's experts have no slots and take one call:
# its passes took 3.1 ms beside the 4.6 of plain ones.
BESIDE, DRAFT_BESIDE, MISS = 1.0, 0.35, 1.0
# Of the rate at which a narrow expert is encoded: whole ones come out of memory, and are encoded
# beside what computes. With the trial's rate a plan expected 104 ms a token; it took 129 to 141.
ENCODING_SHARE = 0.5
# A layer takes this at least: launches of its kernels.
LEAST_LAYER_S = 50e-6


@dataclass(frozen=True, slots=True)
class ProcessorTrial:
    """What is tried, and within which bounds.

    draft        layout of the INT4 copy; None: there is none
    readers      threads that read
    limit_bytes  of memory, about
    """

    opened: Opened
    dtype: torch.dtype
    draft: Int4Layout | None
    readers: int
    limit_bytes: int
    clock: Clock = time.perf_counter

    def survey(self, codecs: Iterable[str]) -> Survey:
        """Try the codecs of those names, and all that they have in common."""
        opened, clock = self.opened, self.clock
        words = torch.ones(
            max(min(self.limit_bytes, MEMORY_BYTES), LEAST_MEMORY_BYTES) // 8, dtype=torch.int64
        )

        def read_memory() -> object:
            return ops.read_sum(words)

        memory_s = passes_s(read_memory, clock)
        slots = [expert_slot(opened.store).zero_() for _ in range(self.readers)]
        link = LinkRates.of(
            lambda sample: link_bytes_per_s(opened.store, slots, clock, first=64 * sample),
            read_memory,
            clock,
        )
        times = PassTimes(0.0, LAYER_S / (1 + BESIDE), 0.0)
        if layer_bytes(opened, self.dtype) <= self.limit_bytes:
            try:
                times = PassTimes.of(opened, self.dtype, clock)
            except (RuntimeError, ValueError, TypeError) as error:
                # A config.json that contradicts itself: loading says what is wrong with it.
                logger.debug("a layer cannot be timed: %s", error)
        layers = opened.shape.num_layers
        experts = ExpertTrial.of(opened.store.codec.shape, self.draft, opened.shape, self.dtype)
        run_s: dict[str, float] = {}
        encode: dict[str, float] = {}
        for name in codecs:
            run_s[name], encode[name] = experts.codec(name, clock)
        return Survey(
            "cpu",
            link.bytes_per_s,
            # At which kernels read words that lie in memory.
            MEMORY_SHARE * words.nbytes / memory_s,
            times.base_s,
            max(times.layer_s * (1 + BESIDE), LEAST_LAYER_S),
            row_s=times.row_s * layers,
            miss_s=times.layer_s * MISS,
            expert_s=run_s,
            draft_expert_s=experts.drafted(clock),
            # A layer misses one expert or two at a time, so that a run waits for one thread.
            encode_bytes_per_s=encode,
            draft_layer_s=max(times.layer_s * (1 + DRAFT_BESIDE), LEAST_LAYER_S),
            link_slows=link.link_slows,
            compute_slows=link.compute_slows,
            spread=link.spread,
        )


@dataclass(frozen=True, slots=True)
class ExpertTrial:
    """One expert, narrower than the model's where those are large, encoded and run.

    scale  the model's expert's bytes over this one's
    base   its INT4 codes; None: experts of these dimensions have none
    """

    words: Matrices
    base: Int4Expert | None
    layout: Int4Layout | None
    shape: ExpertShape
    scale: float
    model: ModelShape
    dtype: torch.dtype

    @classmethod
    def of(
        cls, shape: ExpertShape, draft: Int4Layout | None, model: ModelShape, dtype: torch.dtype
    ) -> "ExpertTrial":
        narrow = narrow_shape(shape)
        words = random_expert(narrow, torch.Generator().manual_seed(1))
        layout = base = None
        if draft is not None:
            layout = Int4Layout(narrow.hidden_size, narrow.expert_width, gated=narrow.gated)
            base = Int4Expert.round(layout, *words)
        return cls(words, base, layout, narrow, shape.nbytes / narrow.nbytes, model, dtype)

    def codec(self, name: str, clock: Clock) -> tuple[float, float]:
        """Seconds to run one of the model's experts, and bytes of words a second that a thread
        encodes.
        """
        codec = codec_of(name, self.shape)
        base = self.base if codec.needs_draft else None
        room = allocate_aligned(1, codec.slot_bytes)[0]
        start_s = clock()
        nbytes = codec.encode(self.words, base, room)
        encoded = ENCODING_SHARE * self.shape.nbytes / max(clock() - start_s, 1e-9)
        return self.scale * self.run_s(codec.with_slot_bytes(nbytes), room[:nbytes], clock), encoded

    def run_s(self, codec: ExpertCodec, record: torch.Tensor, clock: Clock) -> float:
        """Seconds that one of a token's experts takes out of its slot."""
        count = self.model.top_k
        slots = allocate_aligned(count, codec.slot_bytes)
        for slot in slots:
            slot[: len(record)] = record
        experts = codec.experts(slots, self.arena() if codec.needs_draft else None)
        table = torch.arange(count)
        in_slot = {expert: expert for expert in range(count)}
        topk_ids = torch.arange(count).view(1, count)
        grouping = Grouping.of(topk_ids, topk_ids)
        hidden_states, out = (
            self.row(),
            torch.empty(1, count, self.shape.hidden_size).to(self.dtype),
        )

        def run() -> None:
            experts.run(0, hidden_states, grouping, in_slot, table, self.model.activation, out)

        return passes_s(run, clock) / count

    def drafted(self, clock: Clock) -> float:
        """Seconds that one of a drafted token's experts takes; 0 where there are none."""
        if self.layout is None:
            return 0.0
        arena, count = self.arena(), self.model.top_k
        topk_ids = torch.arange(count).view(1, count)
        weights = torch.full((1, count), 1 / count)
        base_slots, backend, hidden_states = arena.base_slots[0], arena.experts, self.row()

        def run() -> None:
            ops.moe_int4(
                hidden_states, topk_ids, weights, base_slots, backend, self.model.activation
            )

        return self.scale * passes_s(run, clock) / count

    def arena(self) -> Int4Arena:
        """A token's experts, all of them alike."""
        no_draft = "INT4 experts are to be timed of a model without a draft"
        layout, base = present(self.layout, no_draft), present(self.base, no_draft)
        arena = Int4Arena(layout, 1, self.model.top_k, torch.device("cpu"))
        for slot in range(self.model.top_k):
            arena.put(slot, base)
        return arena

    def row(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        return torch.randn(1, self.shape.hidden_size, generator=generator).to(self.dtype)


def narrow_shape(shape: ExpertShape) -> ExpertShape:
    """The shape, or one of as many whole groups of neurons as make up `EXPERT_BYTES`."""
    group = 128
    groups = max(EXPERT_BYTES // (3 * group * shape.hidden_size * shape.dtype.itemsize), 1)
    return replace(shape, expert_width=min(shape.expert_width, groups * group))
