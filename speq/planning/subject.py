"""A model to plan for. A config.json is enough."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from speq.drafts.draft_source import open_draft
from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, ExpertShape, RawCodec
from speq.experts.int4 import Int4Layout
from speq.files.alignment import ALIGNMENT
from speq.files.checkpoint import is_quantised
from speq.files.json_file import read_json
from speq.files.range_file import ENDS_BYTES
from speq.governor.planner import PassBytes
from speq.models.families import family_of
from speq.models.opened import Opened
from speq.models.shape import DTYPES, ModelShape, config_in, shape_of


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as planning sees it.

    dtype          computed in; words: of the experts as published
    codec          of the experts at hand, sized by the largest, or of what was published
    published      whether these are words as published, which a run may encode as it reads them
    draft          layout of an INT4 expert; None: there can be none
    reading_bytes  taken by each thread that reads the experts at hand
    loading_bytes  taken by loading beside the weights it leaves
    copying_bytes  taken by writing a packed copy of the experts while the run goes on
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
    copying_bytes: int = 0

    @classmethod
    def of_config(cls, name: str, path: Path, dtype: str) -> "Subject":
        """A folder with a config.json: experts as published, and a draft made by rounding."""
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
        """A whole model: its experts as they are packed, and the draft it would run with."""
        draft = None
        with contextlib.suppress(SpeqError):  # refused by a run, with its reason
            source = open_draft("auto", opened.checkpoint, opened.store, opened.shape.experts)
            with contextlib.closing(source):
                draft = source.layout
        return cls.of_draft(name, opened, dtype, draft)

    @classmethod
    def of_draft(cls, name: str, opened: Opened, dtype: str, draft: Int4Layout | None) -> "Subject":
        """A whole model beside a draft of that layout."""
        store = opened.store
        words = store.codec.shape.dtype
        computed = DTYPES.get(dtype, words)
        return cls(
            name=name,
            shape=opened.shape,
            dtype=computed,
            words=words,
            codec=store.codec,
            published=store.published,
            draft=None if draft is None else _packable(draft),
            reading_bytes=store.reading_bytes,
            loading_bytes=opened.loading_bytes(computed),
        )

    @property
    def num_layers(self) -> int:
        return len(self.shape.experts.layers)

    @property
    def count(self) -> int:
        """Experts of all layers together."""
        return self.num_layers * self.shape.experts.num_experts

    @property
    def draft_bytes(self) -> int:
        """INT4 copy of all experts; 0 where there can be none."""
        return 0 if self.draft is None else self.count * self.draft.nbytes

    @property
    def pass_bytes(self) -> PassBytes:
        shape = self.shape
        fixed_bytes = shape.resident_bytes(self.dtype)
        fixed_bytes -= shape.embedding_weights * self.dtype.itemsize
        token_experts = self.num_layers * shape.top_k
        return PassBytes(
            layers=shape.num_layers,
            fixed_bytes=fixed_bytes,
            draft_fixed_bytes=fixed_bytes,
            draft_token_bytes=token_experts * self.draft_bytes // self.count,
            token_experts=token_experts,
        )


def _packable(draft: Int4Layout) -> Int4Layout | None:
    """None for dimensions that INT4 codes cannot be packed in."""
    with contextlib.suppress(SpeqError):
        _ = draft.nbytes
        return draft
    return None
