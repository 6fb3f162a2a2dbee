"""The ways to hold a model's exact experts: all there are, and those that options leave open."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from speq.config import DraftOptions
from speq.errors import OptionError
from speq.experts.codec import ExpertCodec, codec_of, codecs_for, usual_bytes
from speq.experts.expert_store import ExpertStore
from speq.experts.packed_copy import CODEC as COPY_CODEC
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import WHOLE, DraftPart
from speq.registries import DRAFTERS

# Of the misses of a run that makes a packed copy, on the mean: some runs end before it is complete,
# and others, as servers, long after.
COPIED_SHARE = 0.5


def candidates_of(model_spec: ModelSpec, on_cpu: bool) -> list[ResidencyPlan]:
    """Each codec with and without an INT4 draft, and published words encoded as they are read.

    Records that are read over INT4 codes want those of all experts: no part of them drafts there.
    Experts of another codec than that at hand are thought to lie in it where they are read from,
    as `speq pack` would write them.
    """
    held = [_way(model_spec, name, "none") for name in codecs_for(model_spec.codec.shape)]
    if model_spec.draft is not None:
        parts = product(model_spec.draft_parts, codecs_for(model_spec.codec.shape))
        drafting = [_way(model_spec, name, "int4", part) for part, name in parts]
        held += [way for way in drafting if way.draft_experts is None or not way.needs_draft]
    held = [way for way in held if way.holds_int4 or not way.needs_draft]
    if not model_spec.published:
        return held
    if model_spec.copied_slot_bytes:
        return [way for way in held if way.codec == model_spec.codec.name] + [
            copied(model_spec, way) for way in held if way.codec == COPY_CODEC
        ]
    # On a GPU host memory holds encoded experts, and a miss moves records.
    words_bytes = model_spec.codec.shape.nbytes
    return held + [
        replace(way, encoded=True, moved_bytes=words_bytes if on_cpu else way.moved_bytes)
        for way in held
        if way.codec != model_spec.codec.name
    ]


def copied(model_spec: ModelSpec, way: ResidencyPlan) -> ResidencyPlan:
    """A way to hold the records of a packed copy that is being made, as a mean of what is to come:
    at first no miss finds its record, and is encoded; once the copy is complete, all do.
    """
    slot_bytes = model_spec.copied_slot_bytes
    return replace(
        way,
        encoded=True,
        estimated=False,
        slot_bytes=slot_bytes,
        moved_bytes=int(
            (1 - COPIED_SHARE) * model_spec.codec.shape.nbytes + COPIED_SHARE * slot_bytes
        ),
        read_bytes=slot_bytes,
        copied_share=COPIED_SHARE,
    )


def open_candidates(
    model_spec: ModelSpec, drafts: DraftOptions, codec: str, on_cpu: bool
) -> list[ResidencyPlan]:
    """The ways that a run's options and files allow. Raises SpeqError where options exclude all.

    codec  the option
    """
    given = model_spec.codec.name
    if codec != "auto":
        codec_of(codec, model_spec.codec.shape)  # refuses words that it does not code
    drafter = drafter_of(drafts)
    with_int4 = drafter != "none" and DRAFTERS[drafter].needs_int4
    found = []
    for way in candidates_of(model_spec, on_cpu):
        readable = way.encoded or way.codec == given
        if not readable or codec not in ("auto", way.codec):
            continue
        if with_int4:
            # Without the copy, which may not fit, nobody drafts.
            found.append(replace(way, drafter=drafter) if way.drafts else way)
        elif not way.drafts:
            found.append(replace(way, drafter=drafter))
        elif way.needs_draft and way.codec in (given, codec):
            # Only as a base: who does not draft needs no codes of other layers.
            found.append(replace(way, drafter=drafter, draft_bytes=model_spec.base_bytes))
    if drafts.drafter == "auto" and drafter != "none":
        found += with_measured_head(model_spec, found)
    if model_spec.dense.name == "residual":  # read over the draft's codes
        return [replace(way, dense_base=True) for way in found if way.drafter == "int4"]
    return found


def with_measured_head(
    model_spec: ModelSpec, candidates: Sequence[ResidencyPlan]
) -> list[ResidencyPlan]:
    """The ways without a draft once more, with the model's head in it, if it is known how far its
    drafts are accepted.
    """
    plain = [way for way in candidates if not way.drafts and not way.needs_draft]
    return [replace(way, drafter="head") for way in plain] if model_spec.head_acceptance else []


def check_codec(store: ExpertStore, codec: str) -> None:
    """Raise SpeqError where a packed model is wanted in another codec than it is packed with."""
    given = store.codec.name
    if not store.published and codec not in ("auto", given):
        raise OptionError(
            f"codec {codec} was asked for and the model is packed with codec {given}; leave it to "
            f"be auto, or pack the published model with --codec {codec}"
        )


def check_parts(parts: Sequence[DraftPart], codec: ExpertCodec, wanted: str = "auto") -> None:
    """Raise SpeqError for no more than a part of the INT4 copy where exact experts are read over
    all of it.

    codec  of the experts at hand; wanted: the option codec
    """
    if WHOLE in parts:
        return
    asked = codec if wanted == "auto" else codec_of(wanted, codec.shape)
    for each in (codec, asked):
        if each.needs_draft:
            raise OptionError(
                f"draft_experts is {parts[0].count} and experts of codec {each.name} are read over "
                "the INT4 codes of all experts; leave draft_experts out, or take another codec"
            )


def drafter_of(drafts: DraftOptions) -> str:
    """The drafter that options name, if there is room. Raises SpeqError where it has no draft."""
    if drafts.draft_length == 0:
        return "none"
    if drafts.drafter == "auto":
        return "none" if drafts.draft == "none" else "int4"
    if drafts.draft == "none" and drafts.drafter != "none" and DRAFTERS[drafts.drafter].needs_int4:
        raise OptionError(
            f"drafter {drafts.drafter} drafts with the INT4 copy and draft is none; leave draft to "
            "be auto, or choose another drafter"
        )
    return drafts.drafter


def secondary_drafter(drafts: DraftOptions, approximates: bool) -> str | None:
    """The drafter besides the run's own: prompt lookup takes no memory, where options leave open
    who drafts and how far. None within an expert budget, which goes by the routes that drafts name.
    """
    free = drafts.drafter == "auto" and drafter_of(drafts) != "none"
    return "ngram" if free and drafts.draft_length is None and not approximates else None


def needs_int4(drafts: DraftOptions, asked: str, codec: ExpertCodec) -> bool:
    """True if an INT4 copy is to be held: to draft with, or to read exact experts over.

    asked  the option codec; codec: of the experts at hand
    """
    drafter = drafter_of(drafts)
    if drafter != "none" and DRAFTERS[drafter].needs_int4:
        return True
    wanted = codec if asked == "auto" else codec_of(asked, codec.shape)
    return codec.needs_draft or wanted.needs_draft


def _way(model_spec: ModelSpec, name: str, drafter: str, part: DraftPart = WHOLE) -> ResidencyPlan:
    """Experts as records of a codec, moved as they are. part: what an INT4 draft holds."""
    known = name == model_spec.codec.name
    codec = model_spec.codec if known else codec_of(name, model_spec.codec.shape)
    slot_bytes = codec.slot_bytes if known else usual_bytes(codec)
    draft_bytes = model_spec.draft_bytes_of(part) if drafter == "int4" else 0
    codes_bytes = model_spec.base_bytes // model_spec.count if codec.needs_draft else 0
    return ResidencyPlan(
        codec=name,
        drafter=drafter,
        slot_bytes=slot_bytes,
        moved_bytes=slot_bytes,
        read_bytes=slot_bytes + codes_bytes,
        draft_bytes=draft_bytes,
        draft_experts=part.count,
        draft_covers=part.covers,
        needs_draft=codec.needs_draft,
        estimated=not known and codec.usual_bits is not None,
    )
