"""`speq pack`: a model whose experts are records of their own, for fast and checked reading."""

from typing import Annotated

from speq.cli import options as opt
from speq.config import Model
from speq.quantizing.settings import PackSettings
from speq.units import format_bytes


def pack(
    model: Model, settings: PackSettings, output: Annotated[opt.Output, opt.ON_SCREEN]
) -> None:
    """Write a model anew, each expert one contiguous record with a checksum.

    Interrupted, it leaves a folder that no run opens; the same command goes on from there.
    """
    from speq.quantizing.models import pack_with

    with output.progress() as progress:
        manifest = pack_with(model, settings, progress)
    output.note(
        f"{settings.out}: {len(manifest.records)} experts, {format_bytes(sum(manifest.ends))}; "
        f"codec {manifest.codec}, {manifest.bits_per_weight:.2f} bits a weight"
    )
    if manifest.stripe is not None:
        there = sum(record.disk for record in manifest.records)
        size = format_bytes(manifest.ends[1])
        output.note(f"{manifest.stripe.folder}: {there} of them, {size}")
