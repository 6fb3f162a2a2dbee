"""`speq check`: is our exact path the published model, on this machine, for this checkpoint?"""

from pathlib import Path
from typing import Annotated

import typer

from speq.cli import options as opt


def check(
    model: opt.ModelArgument,
    memory_budget: opt.MemoryBudget,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    draft: opt.DraftOption = "auto",
    codec: opt.Codec = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with a `prompt` in each row.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    force: opt.Force = False,
) -> None:
    """Compare our exact path, teacher-forced, with plain transformers.

    Needs memory for the whole model. Fails where the two disagree by more than rounding. A packed
    model is compared with its checksums, all of it.
    """
    from speq.measure import check as bench_check

    report, verdict = bench_check.run(
        model,
        memory_budget,
        device=device,
        dtype=dtype,
        draft=draft,
        codec=codec,
        prompts=prompts,
        num_prompts=num_prompts,
        json_file=json_file,
        force=force,
    )
    report.print(bench_check.columns_of(report))
    typer.echo(verdict.sentence)
    if not verdict.passed:
        raise typer.Exit(1)
