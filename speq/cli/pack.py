"""`speq pack`: a model whose experts are records of their own, for fast and checked reading."""

from pathlib import Path
from typing import Annotated

import typer

from speq.cli import options as opt


def pack(
    model: opt.ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; itself a model then.")],
) -> None:
    """Write a model anew, each expert one contiguous record with a checksum.

    Interrupted, it leaves a folder that no run opens; the same command goes on from there.
    """
    from speq.config import format_bytes
    from speq.errors import SpeqError
    from speq.runtime import open_model
    from speq.store.expert_store import SafetensorsExpertStore
    from speq.store.pack import pack as write

    opened = open_model(model)
    try:
        if not isinstance(opened.store, SafetensorsExpertStore):
            raise SpeqError(f"model {model!r} is packed already; give the one it was packed from")
        with opt.progress_bar() as progress:
            manifest = write(
                opened.checkpoint,
                opened.store,
                out,
                lambda done, total: progress("packing experts", done, total),
            )
    finally:
        opened.close()
    typer.echo(f"{out}: {len(manifest.records)} experts, {format_bytes(manifest.end)}")
