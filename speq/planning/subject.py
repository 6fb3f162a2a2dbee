"""What can be planned for: a model, the ways to hold its experts, and a budget.

A config.json is enough. Memory is counted by the same code as a run's (`speq.planning.demand`).
"""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from speq.config import DEFAULT_READER_THREADS
from speq.drafts.draft_source import open_draft
from speq.errors import SpeqError, checked_int
from speq.experts.codec import ExpertCodec, ExpertShape, RawCodec, codec_of
from speq.experts.encoding_store import encoding_bytes
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.int4 import Int4Layout
from speq.files.alignment import ALIGNMENT
from speq.files.checkpoint import is_quantised
from speq.files.json_file import read_json
from speq.files.range_file import ENDS_BYTES
from speq.governor.adaptive import LONGEST
from speq.governor.planner import PassBytes
from speq.models.families import family_of
from speq.models.opened import Opened
from speq.models.shape import DTYPES, ModelShape, config_in, shape_of
from speq.planning.demand import ExpertSizes, demand_by_sizes, loading_bytes_of, order_bytes_of
from speq.planning.memory import Demand, Representation
from speq.planning.representation import side_by_side

# What a plan is for where nothing is said: enough for a chat.
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Way:
    """To hold exact experts. encoded: as they are read, from words as published; else they are
    thought to lie in that codec where they are read from.
    """

    held: Representation
    encoded: bool = False

    @property
    def codec(self) -> str:
        return self.held.codec

    @property
    def drafts(self) -> bool:
        return self.held.draft_bytes > 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for.

    dtype          computed in; words: of the experts as published
    codec          of the experts at hand, sized by the largest, or what was published
    published      whether these are words as published, which a run may encode as it reads them
    draft          layout of an INT4 expert; None: there can be none
    reading_bytes  what each thread that reads the experts at hand takes
    loading_bytes  what loading takes beside the weights it leaves
    """

    name: str
    shape: ModelShape
    dtype: torch.dtype
    words: torch.dtype
    codec: ExpertCodec
    published: bool
    draft: Int4Layout | None
    reading_bytes: int
    loading_bytes: int

    @classmethod
    def of_config(cls, name: str, path: Path, dtype: str) -> "Subject":
        """Of a folder with a config.json: experts as published, and a draft made by rounding."""
        content = read_json(path / "config.json")
        if is_quantised(content):
            raise SpeqError(
                f"{path} is quantised; give the original 16- or 32-bit model, whose output is the "
                "one to reproduce"
            )
        config = config_in(path)
        shape = shape_of(family_of(content, path), config, path / "config.json")
        words = config.dtype if config.dtype in DTYPES.values() else torch.bfloat16
        experts = shape.experts
        computed = DTYPES.get(dtype, words)
        stored_bytes = shape.resident_weights * words.itemsize
        return cls(
            name=name,
            shape=shape,
            dtype=computed,
            words=words,
            codec=RawCodec(ExpertShape(experts.hidden_size, experts.expert_width, words)),
            published=True,
            draft=_packable(Int4Layout(experts.hidden_size, experts.expert_width)),
            reading_bytes=ENDS_BYTES + ALIGNMENT,
            loading_bytes=0 if computed == words else stored_bytes,
        )

    @classmethod
    def of_model(cls, name: str, opened: Opened, dtype: str) -> "Subject":
        """Of a whole model: its experts as they are packed, and the draft it would run with."""
        draft = None
        with contextlib.suppress(SpeqError):  # refused by a run, with its reason
            source = open_draft("auto", opened.checkpoint, opened.store, opened.shape.experts)
            with contextlib.closing(source):
                draft = source.layout
        return cls.of_draft(name, opened, dtype, draft)

    @classmethod
    def of_draft(cls, name: str, opened: Opened, dtype: str, draft: Int4Layout | None) -> "Subject":
        """Of a whole model beside a draft of that layout."""
        store = opened.store
        words = store.codec.shape.dtype
        computed = DTYPES.get(dtype, words)
        return cls(
            name=name,
            shape=opened.shape,
            dtype=computed,
            words=words,
            codec=store.codec,
            published=isinstance(store, SafetensorsExpertStore),
            draft=None if draft is None else _packable(draft),
            reading_bytes=store.reading_bytes,
            loading_bytes=loading_bytes_of(opened.checkpoint, opened.family.names, computed),
        )

    @property
    def num_layers(self) -> int:
        return len(self.shape.experts.layers)

    @property
    def count(self) -> int:
        return self.num_layers * self.shape.experts.num_experts

    def ways(self, encoded_by: Collection[str] = ()) -> list[Way]:
        """With and without a draft, in each codec.

        encoded_by  codecs that published words may be encoded by as they are read, which are ways
                    of their own beside records that lie so
        """
        held = side_by_side(self.codec, 0)
        if self.draft is not None:
            held += side_by_side(self.codec, self.count * self.draft.nbytes)
        others = {*encoded_by} - {self.codec.name} if self.published else set()
        return [Way(each) for each in held] + [
            Way(each, encoded=True) for each in held if each.codec in others
        ]

    @property
    def pass_bytes(self) -> PassBytes:
        shape = self.shape
        draft_bytes = 0 if self.draft is None else self.draft.nbytes
        return PassBytes(
            layers=shape.num_layers,
            fixed_bytes=shape.resident_bytes(self.dtype)
            - shape.embedding_weights * self.dtype.itemsize,
            draft_token_bytes=self.num_layers * shape.top_k * draft_bytes,
        )

    def demand(self, way: Way, budget: "Budget") -> Demand:
        """What a run with experts held so would ask of memory."""
        draft_bytes = way.held.draft_bytes // self.count
        over_draft = way.encoded and codec_of(way.codec, self.codec.shape).needs_draft
        order_bytes = order_bytes_of(self.draft) if over_draft and self.draft else 0
        sizes = ExpertSizes(
            self.count, way.held.slot_bytes, self._reading_bytes(way), way.drafts, order_bytes
        )
        return demand_by_sizes(
            self.shape,
            sizes,
            draft_bytes,
            budget.longest_draft,
            self.dtype,
            self.loading_bytes if budget.on_cpu else 0,
            budget.readers if budget.on_cpu else 0,
        )

    def _reading_bytes(self, way: Way) -> int:
        """Of each thread; packed records go straight into their slots."""
        if way.encoded:
            codec = codec_of(way.codec, self.codec.shape)
            return self.reading_bytes + encoding_bytes(self.codec, codec)
        if way.codec == self.codec.name:
            return self.reading_bytes
        return ENDS_BYTES + ALIGNMENT if way.codec == "raw" else 0


@dataclass(frozen=True, slots=True)
class Budget:
    """What is planned for.

    context        tokens of KV cache
    readers        threads that read, on the CPU
    longest_draft  tokens of a draft that is to be verified, at most
    """

    budget_bytes: int
    context: int
    on_cpu: bool
    readers: int = DEFAULT_READER_THREADS
    longest_draft: int = LONGEST

    @classmethod
    def of(
        cls, budget_bytes: int, context: int | None, on_cpu: bool, shape: ModelShape
    ) -> "Budget":
        """context None: `DEFAULT_CONTEXT`, or the model's limit where that is less."""
        limit = shape.max_context
        if context is None:
            context = min(DEFAULT_CONTEXT, limit)
        return cls(budget_bytes, checked_int("context_length", context, 1, limit), on_cpu)


def _packable(draft: Int4Layout) -> Int4Layout | None:
    """None of dimensions that INT4 codes cannot be packed in."""
    with contextlib.suppress(SpeqError):
        _ = draft.nbytes
        return draft
    return None
