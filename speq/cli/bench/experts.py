"""Which experts are wanted, and when they come."""

from pathlib import Path
from typing import Annotated

import typer

from speq.cli import options as opt
from speq.cli.bench.app import bench_app
from speq.config import DEFAULT_READER_THREADS


@bench_app.command("hit-rate")
def hit_rate(
    model: opt.ModelArgument,
    memory_budget: Annotated[
        str, typer.Option(help="Room for all experts and the draft, to record in.")
    ],
    draft_length: Annotated[int, typer.Option(help="Tokens drafted per step.")] = 8,
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 12,
    max_new_tokens: opt.MaxNewTokens = 128,
    beside: Annotated[
        str | None, typer.Option(help="A model whose times the routes are replayed with as well.")
    ] = None,
    beside_budget: Annotated[str | None, typer.Option(help="Room for all of its experts.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Keep the recorded routes here.")] = None,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Experts in slots when they are needed: recorded routes through the scheduler."""
    from speq.bench.replay import hit_rate as bench_hit_rate

    bench_hit_rate.run(
        model,
        bench_hit_rate.Settings(
            memory_budget=memory_budget,
            draft_length=draft_length,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            beside=beside,
            beside_budget=beside_budget,
            trace=trace,
        ),
        json_file=json_file,
        force=force,
    ).print(bench_hit_rate.COLUMNS)


@bench_app.command("locality")
def locality(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="What `speq bench hit-rate --trace` recorded.")
    ],
    windows: Annotated[
        str, typer.Option(help="Tokens of a verification, numbers separated by commas.")
    ] = "1,5,9",
    slots: Annotated[
        str, typer.Option(help="Slots of a layer, numbers separated by commas.")
    ] = "4,8,16,24",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Distinct experts by tokens, which plans count by, beside what policies really miss."""
    from speq.bench.replay import locality as bench_locality
    from speq.measure.report import parse_numbers

    report = bench_locality.run(
        trace,
        bench_locality.Settings(parse_numbers("windows", windows), parse_numbers("slots", slots)),
        json_file=json_file,
        force=force,
    )
    report.print(bench_locality.COLUMNS)
    for note in bench_locality.notes(report):
        typer.echo(note)


@bench_app.command("schedule")
def schedule(
    model: opt.ModelArgument,
    fractions: Annotated[
        str, typer.Option(help="Shares of the experts' memory, separated by commas.")
    ] = "0.5,0.7",
    draft_length: Annotated[int, typer.Option(help="Tokens drafted per step.")] = 4,
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 3,
    max_new_tokens: opt.MaxNewTokens = 48,
    rounds: Annotated[int, typer.Option(help="Times each system is measured.")] = 3,
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """The scheduler on a model larger than memory, beside LRU, and both beside their floors."""
    from speq.bench.runs import schedule as bench_schedule

    bench_schedule.run(
        model,
        bench_schedule.Settings(
            fractions=fractions,
            draft_length=draft_length,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            reader_threads=reader_threads,
        ),
        json_file=json_file,
        force=force,
    ).print(bench_schedule.COLUMNS)


@bench_app.command("fidelity")
def fidelity(
    model: opt.ModelArgument,
    memory_budget: opt.MemoryBudget,
    draft: opt.DraftOption = "auto",
    draft_length: Annotated[int, typer.Option(help="Tokens the draft runs on freely.")] = 8,
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each prompt at most.")] = 256,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    pictures: Annotated[
        Path | None, typer.Option(help="Draw the figures as HTML pages into this folder.")
    ] = None,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Experts the draft chooses beside those of the exact model, by layer and along a draft."""
    from speq.bench.runs import fidelity as bench_fidelity

    settings = bench_fidelity.Settings(
        memory_budget=memory_budget,
        draft=draft,
        draft_length=draft_length,
        prompts=prompts,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        device=device,
        dtype=dtype,
        reader_threads=reader_threads,
    )
    with opt.progress_bar() as progress:
        report = bench_fidelity.run(
            model,
            settings,
            json_file=json_file,
            pictures=pictures,
            force=force,
            progress=progress,
        )
    report.print_all()
