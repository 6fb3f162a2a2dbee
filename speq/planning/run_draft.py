"""What a run may draft with: opened and checked before any weight is loaded."""

from dataclasses import dataclass, replace

from speq.config import DraftOptions
from speq.drafts.dense_draft import DenseDraft
from speq.drafts.draft_source import RoundedDraft, dense_draft, open_draft
from speq.errors import OptionError, SpeqError
from speq.experts.draft_codes import DraftSource
from speq.heads.draft_head import HeadSource
from speq.heads.predicted_experts import head_worth_weighing, open_head
from speq.models.opened import Opened
from speq.planning.candidates import check_parts, drafter_of, needs_int4
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import DraftPart, UsedExperts, used_experts, warn_without_counts


@dataclass(frozen=True, slots=True)
class RunDraft:
    """The draft that options name.

    source  of the INT4 copy of the experts
    dense   layers beside the experts that drafts run on INT4 codes
    used    which experts are used most; parts: of them, that the copy may hold
    head    a head that drafts, or may; None where another drafter does
    """

    source: DraftSource
    dense: DenseDraft
    used: UsedExperts
    parts: tuple[DraftPart, ...]
    head: HeadSource | None

    @classmethod
    def open(cls, opened: Opened, drafts: DraftOptions, codec: str) -> "RunDraft":
        """Raises SpeqError where a file is missing or damaged, or does not fit the model.

        codec  the option
        """
        asked, shape = drafts.draft_experts, opened.shape
        used = used_experts(asked, drafts.draft_counts, opened.checkpoint, shape)
        parts = used.parts(asked)
        check_parts(parts, opened.store.codec, codec)
        warn_without_counts(used, asked)
        source = draft_source(opened, drafts, codec)
        try:
            dense = dense_draft(drafts.draft_dense, shape.draft_layers, source)
            return cls(source, dense, used, parts, head_source(opened, drafts))
        except BaseException:
            source.close()
            raise

    def model_spec(self, opened: Opened, dtype: str) -> ModelSpec:
        """The model beside this draft."""
        name = str(opened.checkpoint.path)
        spec = ModelSpec.of_draft(name, opened, dtype, self.source.layout, self.dense)
        spec = replace(spec, draft_parts=self.parts)
        if self.head is None:
            return spec
        return replace(spec, head=self.head.shape, head_acceptance=self.head.acceptance_rates)

    def close(self) -> None:
        self.source.close()


def draft_source(opened: Opened, drafts: DraftOptions, codec: str) -> DraftSource:
    """The INT4 codes that options name, opened and checked. Raises SpeqError where they do not fit.

    codec  the option
    """
    checkpoint, store, experts = opened.checkpoint, opened.store, opened.shape.experts
    int4 = needs_int4(drafts, codec, store.codec)
    if drafts.draft == "none" and int4:
        drafter_of(drafts)  # refuses one that has nothing to draft with
        named = store.codec.name if codec == "auto" else codec
        raise OptionError(
            f"draft is none, and experts of codec {named} are read over a draft's codes; leave "
            "draft to be auto"
        )
    if drafts.draft in ("auto", "none") and not int4:
        return RoundedDraft(checkpoint, store, experts, owned=False)
    source = open_draft(drafts.draft, checkpoint, store, experts, opened.shape.draft_layers)
    try:
        _ = source.layout.nbytes  # refuses experts that INT4 codes cannot be packed for
    except SpeqError:
        source.close()
        raise
    return source


def head_source(opened: Opened, drafts: DraftOptions) -> HeadSource | None:
    """The head that is to draft, or may; None where another drafter does.

    Raises SpeqError where one is asked for that is missing, damaged or another model's.
    """
    drafter = drafter_of(drafts)
    if drafts.drafter == "auto" and drafter != "none":
        return head_worth_weighing(opened)
    return open_head(drafts.head, opened) if drafter == "head" else None
