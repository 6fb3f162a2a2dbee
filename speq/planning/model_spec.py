"""A model to plan for. A config.json is enough."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from speq.drafts.dense_draft import EXPERTS_ONLY, DenseDraft
from speq.drafts.draft_source import dense_draft, open_draft
from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, ExpertShape, own_codec
from speq.experts.expert_store import SafetensorsExpertStore, check_groups, reading_bytes
from speq.experts.int4 import Int4Layout
from speq.files.json_file import read_json
from speq.files.packing import INT4, Int4Groups
from speq.files.published_format import FP8, WORDS, format_of
from speq.heads.draft_head import HeadSizes
from speq.kernels.library import KERNELS, Kernels
from speq.models.dense_form import DenseForm
from speq.models.families import family_of
from speq.models.opened import Opened
from speq.models.shape import DTYPES, ModelShape, config_in, shape_of
from speq.planning.cost.planner import PassBytes
from speq.planning.used_experts import WHOLE, DraftPart

# Columns that share a scale in most publications in INT4.
USUAL_GROUP = 128
# Of a code in formats whose codes may be such that no kernel multiplies them.
CODE_BITS = {FP8: 8, INT4: 4}
# Of an expert's record a draft's codes of it take this at most.
DRAFT_SHARE = 3 / 4
# A smaller embedding is not worth a read for each token.
LEAST_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as planning sees it.

    dtype          computed in; words: of the experts as published
    codec          of the experts at hand, sized by the largest, or of what was published
    published      whether these are words as published, which a run may encode as it reads them
    draft          layout of an INT4 expert; None: there can be none
    dense_draft    the draft's other layers that run on codes
    reading_bytes  taken by each thread that reads the experts at hand
    converted_bytes  of tensors outside the experts that are stored in another dtype
    dense          how the matrices outside the experts are held
    copying_bytes  taken by writing a packed copy of the experts while the run goes on
    copied_slot_bytes  of a slot for the records of that copy; 0: none is written
    packed_dense   sizes of the records in a pack of `ModelShape.dense`, None of those that it has
                   none of; empty where no pack holds any
    draft_parts    which shares of the experts the draft may hold, of which one is chosen
    head           sizes of the head that may draft; None: there is none
    head_acceptance     by depth, acceptance of its tokens in training; empty: not measured
    codes_bytes    of an expert that is decoded to words as it is read; 0: none is
    dense_byte_cost     the time of a byte of `dense` over that of a byte of words; 1: not measured
    has_table      whether the embedding may stay on disk: see `may_leave_table`
    table_on_disk  whether its rows are read from there as tokens ask for them
    """

    name: str
    shape: ModelShape
    dtype: torch.dtype
    words: torch.dtype
    codec: ExpertCodec
    published: bool
    draft: Int4Layout | None
    dense_draft: DenseDraft
    reading_bytes: int
    converted_bytes: int
    dense: DenseForm
    copying_bytes: int = 0
    copied_slot_bytes: int = 0
    codes_bytes: int = 0
    packed_dense: tuple[int | None, ...] = ()
    head: HeadSizes | None = None
    head_acceptance: tuple[float, ...] = ()
    draft_parts: tuple[DraftPart, ...] = (WHOLE,)
    dense_byte_cost: float = 1.0
    has_table: bool = False
    table_on_disk: bool = False

    @classmethod
    def of_config(cls, name: str, path: Path, dtype: str) -> "ModelSpec":
        """A folder with a config.json: experts as published, and a draft made by rounding."""
        content = read_json(path / "config.json")
        published = format_of(content, path)
        config = config_in(path)
        family = family_of(content, path)
        shape = shape_of(family, config, path / "config.json")
        words = config.dtype if config.dtype in DTYPES.values() else torch.bfloat16
        words = words if published.name == WORDS else torch.bfloat16
        experts = shape.experts
        sizes = experts.hidden_size, experts.expert_width
        packing, groups, _ = published.packed or (None, None, False)
        divides, blocks = packing is not None and packing.divides, published.fp8.blocks
        stored = ExpertShape(
            *(*sizes, words, published.name, groups, divides, blocks, experts.gated)
        )
        if published.decoded:
            stored = ExpertShape(*sizes, words, gated=experts.gated)
        check_groups(stored, path)
        codec = own_codec(stored)
        computed = DTYPES.get(dtype, words)
        family.check_dtype(computed)
        stored_bytes = shape.resident_weights * words.itemsize
        return cls(
            name=name,
            shape=shape,
            dtype=computed,
            words=words,
            codec=codec,
            published=True,
            draft=useful_draft(Int4Layout(*sizes, gated=experts.gated), codec),
            dense_draft=DenseDraft.of("auto", shape.draft_layers),
            reading_bytes=reading_bytes(stored, experts.stacked, packing, published.decoded),
            converted_bytes=0 if computed == words else stored_bytes,
            dense=DenseForm.raw(shape.dense, computed.itemsize),
            codes_bytes=stored.weights * CODE_BITS[published.name] // 8 if published.decoded else 0,
            has_table=may_leave_table(
                shape, words if published.name == WORDS else config.dtype, computed
            ),
        )

    @classmethod
    def of_model(cls, name: str, opened: Opened, dtype: str) -> "ModelSpec":
        """A whole model: its experts as they are packed, and the draft it would run with."""
        draft, shapes = None, opened.shape.draft_layers
        dense = DenseDraft.of("auto", shapes)
        with contextlib.suppress(SpeqError):  # refused by a run, with its reason
            checkpoint, store, experts = opened.checkpoint, opened.store, opened.shape.experts
            source = open_draft("auto", checkpoint, store, experts, shapes)
            with contextlib.closing(source):
                draft, dense = source.layout, dense_draft("auto", shapes, source)
        return cls.of_draft(name, opened, dtype, draft, dense)

    @classmethod
    def of_draft(
        cls,
        name: str,
        opened: Opened,
        dtype: str,
        draft: Int4Layout | None,
        dense: DenseDraft = EXPERTS_ONLY,
    ) -> "ModelSpec":
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
            draft=None if draft is None else useful_draft(draft, store.codec),
            dense_draft=dense,
            reading_bytes=store.reading_bytes,
            converted_bytes=opened.converted_bytes(computed),
            dense=DenseForm.raw(opened.shape.dense, computed.itemsize),
            packed_dense=opened.packed_dense(computed),
            codes_bytes=store.codes_bytes if isinstance(store, SafetensorsExpertStore) else 0,
            has_table=may_leave_table(opened.shape, opened.table_dtype, computed),
        )

    def published_as(self, published: str) -> "ModelSpec":
        """The same model, if its experts were published in FP8 or INT4.

        Raises SpeqError for sizes that the format does not allow.
        """
        groups = Int4Groups(USUAL_GROUP, zeros=False) if published == INT4 else None
        stored = replace(self.codec.shape, published=published, groups=groups)
        stored = replace(stored, dtype=torch.bfloat16)
        check_groups(stored, Path(self.name))
        codec = own_codec(stored)
        draft = None if self.draft is None else useful_draft(self.draft, codec)
        return replace(self, codec=codec, published=True, draft=draft, codes_bytes=0)

    @property
    def published_bytes(self) -> int:
        """Bytes of an expert as published."""
        if self.codes_bytes:
            return self.codes_bytes
        shape = self.codec.shape
        return shape.nbytes if shape.published == WORDS else self.codec.record_range[1]

    @property
    def num_layers(self) -> int:
        return len(self.shape.experts.layers)

    @property
    def count(self) -> int:
        """Experts of all layers together."""
        return self.num_layers * self.shape.experts.num_experts

    @property
    def non_expert_bytes(self) -> int:
        """Weights outside the experts, as they are held."""
        saved_bytes = sum(self.dense.words_bytes) - self.dense.nbytes
        if self.table_on_disk:
            saved_bytes += table_bytes(self.shape, self.dtype)
        return self.shape.resident_bytes(self.dtype) - saved_bytes

    def with_table_on_disk(self) -> "ModelSpec":
        """The same, its embedding left on disk, and other matrices in the form that they have."""
        return replace(self, table_on_disk=True, dense=self.dense.without_table())

    def with_dense(
        self, name: str, usual: bool = False, kernels: Kernels = KERNELS["cpu"]
    ) -> "ModelSpec":
        """The same, its dense matrices in another form: as small as they can be there, or as usual.
        kernels: that run them.

        Records have sizes that only loading tells, or a pack that holds them. A plan by the
        smallest refuses no budget that would do.
        """
        shapes, itemsize = self.shape.dense, self.dtype.itemsize
        if name == "raw":
            form = DenseForm.raw(shapes, itemsize)
            return replace(self, dense=form.without_table() if self.table_on_disk else form)
        sized = DenseForm.usual if usual else DenseForm.least
        form = sized(name, shapes, itemsize, kernels)
        if name == "lossless" and self.packed_dense:
            form = form.in_pack(
                [
                    nbytes if nbytes is None or kernels.takes_record(nbytes, columns) else words
                    for nbytes, words, (_, columns) in zip(
                        self.packed_dense, form.words_bytes, shapes, strict=True
                    )
                ]
            )
        form = form.without_table() if self.table_on_disk else form
        return replace(self, dense=form, dense_byte_cost=1.0)

    @property
    def base_bytes(self) -> int:
        """INT4 copy of all experts; 0 where there can be none."""
        return 0 if self.draft is None else self.count * self.draft.nbytes

    @property
    def draft_bytes(self) -> int:
        """The draft: INT4 copy of all experts, and codes of other layers; 0: there can be none."""
        return self.draft_bytes_of(WHOLE)

    def draft_bytes_of(self, part: DraftPart) -> int:
        """The same of a draft that holds a part of the experts."""
        if self.draft is None:
            return 0
        return self.drafted_experts(part.count) * self.draft.nbytes + self.dense_draft.nbytes

    def drafted_experts(self, count: int | None) -> int:
        """Experts of all layers together of which a draft holds so many a layer; None: all."""
        return self.count if count is None else self.num_layers * count

    @property
    def pass_bytes(self) -> PassBytes:
        """Bytes that a pass reads: of slower records, as many as words have in their time."""
        shape, codes = self.shape, self.dense_draft
        token_experts = self.num_layers * shape.top_k
        # The first matrix is the embedding, the last one the head.
        unread_bytes = 0 if shape.tied else self.dense.sizes[0]
        said_bytes = self.dense.sizes[0 if shape.tied else -1]
        records_bytes = self.dense.nbytes - unread_bytes
        fixed_bytes = self.non_expert_bytes - unread_bytes
        fixed_bytes += int((self.dense_byte_cost - 1) * records_bytes)
        if self.dense.name == "residual":
            fixed_bytes += sum(layout.nbytes for layout in codes.bases)
        weights = sum(layout.outputs * layout.columns for layout in codes.layouts.values())
        words_bytes = weights * self.dtype.itemsize
        replaced_bytes = words_bytes * self.dense.nbytes // sum(self.dense.words_bytes)
        replaced_bytes = int(self.dense_byte_cost * replaced_bytes)
        return PassBytes(
            layers=shape.num_layers,
            fixed_bytes=fixed_bytes,
            draft_fixed_bytes=fixed_bytes - replaced_bytes + codes.nbytes,
            draft_token_bytes=token_experts * self.base_bytes // self.count,
            token_experts=token_experts,
            # Tokens are said by a matrix of the embedding's shape.
            head_bytes=self.head.nbytes(self.dtype) + said_bytes if self.head else 0,
        )


def may_leave_table(shape: ModelShape, stored: torch.dtype | None, computed: torch.dtype) -> bool:
    """True if a model's embedding may stay on disk: it is not the head as well, it is stored in the
    dtype that is computed with, and its memory is worth a read for each token.
    """
    return (
        not shape.tied and stored == computed and table_bytes(shape, computed) >= LEAST_TABLE_BYTES
    )


def table_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the embedding in memory."""
    rows, columns = shape.dense[0]
    return rows * columns * dtype.itemsize


def useful_draft(draft: Int4Layout, codec: ExpertCodec) -> Int4Layout | None:
    """None for dimensions that INT4 codes cannot be packed in, and for a draft that is about as
    large as the experts, as beside MXFP4: slots for these do more in its place.
    """
    with contextlib.suppress(SpeqError):
        return draft if draft.nbytes <= DRAFT_SHARE * codec.record_range[1] else None
    return None
