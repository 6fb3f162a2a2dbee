"""`speq pack`: a model whose experts are records of their own, for fast and checked reading."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speq.cli import options as opt

if TYPE_CHECKING:
    from speq.experts.record_writer import Packing
    from speq.models.opened import Opened


def pack(
    model: opt.ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; itself a model then.")],
    codec: Annotated[
        str,
        typer.Option(
            help="raw: words as they are; lossless: smaller, bit for bit the same; residual: "
            "smaller still, what a draft's codes do not say, with that draft."
        ),
    ] = "raw",
    draft: Annotated[
        str,
        typer.Option(
            help="Of residuals: auto, or the folder or hub id of a GPTQ checkpoint, or of one to "
            "round."
        ),
    ] = "auto",
) -> None:
    """Write a model anew, each expert one contiguous record with a checksum.

    Interrupted, it leaves a folder that no run opens; the same command goes on from there.
    """
    from speq.errors import SpeqError
    from speq.experts.expert_store import SafetensorsExpertStore
    from speq.experts.pack import pack as write
    from speq.models.opened import open_model
    from speq.units import format_bytes

    opened = open_model(model)
    try:
        if not isinstance(opened.store, SafetensorsExpertStore):
            raise SpeqError(f"model {model!r} is packed already; give the one it was packed from")
        packing = packing_of(opened, codec, draft)
        try:
            with opt.progress_bar() as progress:
                manifest = write(
                    opened.checkpoint,
                    opened.store,
                    out,
                    packing,
                    lambda done, total: progress("packing experts", done, total),
                )
        finally:
            if packing.draft is not None:
                packing.draft.close()
    finally:
        opened.close()
    typer.echo(
        f"{out}: {len(manifest.records)} experts, {format_bytes(manifest.end)}; codec {codec}, "
        f"{manifest.bits_per_weight:.2f} bits a weight"
    )


def packing_of(opened: "Opened", codec: str, draft: str) -> "Packing":
    """What the options ask for. Raises SpeqError where the model or the draft forbids it."""
    from speq.drafts.draft_source import open_draft
    from speq.errors import SpeqError, checked_choice
    from speq.experts.codec import codec_of
    from speq.experts.record_writer import Packing
    from speq.registries import CODECS

    checked_choice("codec", codec, CODECS.names)
    made = codec_of(codec, opened.store.codec.shape)
    if not made.needs_draft:
        if draft != "auto":
            raise SpeqError(f"draft {draft!r} is of no use to codec {codec}; residual takes one")
        return Packing(made)
    if draft == "none":
        raise SpeqError(f"codec {codec} codes what a draft does not say; give a draft, or auto")
    return Packing(made, open_draft(draft, opened.checkpoint, opened.store, opened.shape.experts))
