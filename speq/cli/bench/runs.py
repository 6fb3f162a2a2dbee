"""Whole runs: time per token by budget, representation and draft length."""

from pathlib import Path
from typing import Annotated

import typer

from speq.cli import options as opt
from speq.cli.bench.app import bench_app
from speq.config import DEFAULT_READER_THREADS


@bench_app.command("tpot")
def tpot(
    model: opt.ModelArgument,
    budgets: Annotated[str, typer.Option(help="Memory budgets, separated by commas.")],
    draft_lengths: Annotated[
        str, typer.Option(help="Draft lengths, separated by commas; 0 is without a draft.")
    ] = "0,4",
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 4,
    max_new_tokens: opt.MaxNewTokens = 64,
    rounds: Annotated[int, typer.Option(help="Times each setting is measured.")] = 3,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    cache_policy: opt.CachePolicy = "lru",
    prefetch: opt.Prefetch = "none",
    codec: opt.Codec = "auto",
    profile: opt.Profile = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Time per output token over memory budgets and draft lengths, settings in rotation."""
    from speq.bench.runs import tpot as bench_tpot

    bench_tpot.run(
        model,
        bench_tpot.Settings(
            budgets=[part.strip() for part in budgets.split(",")],
            draft_lengths=[part.strip() for part in draft_lengths.split(",")],
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            run={
                "device": device,
                "dtype": dtype,
                "cache_policy": cache_policy,
                "prefetch": prefetch,
                "codec": codec,
                "profile": profile,
                "reader_threads": reader_threads,
            },
        ),
        json_file=json_file,
        force=force,
    ).print(bench_tpot.COLUMNS)


@bench_app.command("equal-memory")
def equal_memory(
    model: opt.ModelArgument,
    memory_budget: Annotated[
        str, typer.Option(help="Room for all experts and the draft, to record routes in.")
    ],
    fractions: Annotated[
        str, typer.Option(help="Shares of the experts' memory, separated by commas.")
    ] = "0.35,0.4,0.5,0.6,0.75",
    draft_lengths: Annotated[
        str, typer.Option(help="Draft lengths to choose from, separated by commas.")
    ] = "2,4,8",
    lossless: Annotated[
        Path | None, typer.Option(help="The model packed with codec lossless.")
    ] = None,
    residual: Annotated[
        Path | None, typer.Option(help="The model packed with codec residual.")
    ] = None,
    engine_fractions: Annotated[
        str | None, typer.Option(help="Shares to run the engine at, from the packed models.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Bytes a second that replays move, such as 1.2GB.")
    ] = None,
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them, and one to try on.")] = 4,
    max_new_tokens: opt.MaxNewTokens = 128,
    rounds: Annotated[int, typer.Option(help="Times the engine runs each system.")] = 3,
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    picture: Annotated[
        Path | None, typer.Option(help="Draw bytes and times into this HTML page.")
    ] = None,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """LRU, drafts and compact experts at equal device memory: bytes moved and time per token."""
    from speq.bench.paper import equal_memory as bench_equal_memory

    settings = bench_equal_memory.Settings(
        memory_budget=memory_budget,
        fractions=fractions,
        draft_lengths=draft_lengths,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        reader_threads=reader_threads,
        link=link,
        lossless=lossless,
        residual=residual,
        engine_fractions=engine_fractions,
    )
    with opt.progress_bar() as progress:
        report = bench_equal_memory.run(
            model,
            settings,
            json_file=json_file,
            picture=picture,
            force=force,
            progress=progress,
        )
    report.print_all()
    typer.echo(bench_equal_memory.NOTE)


@bench_app.command("governor")
def governor(
    model: opt.ModelArgument,
    budgets: Annotated[str, typer.Option(help="Memory budgets, separated by commas.")],
    draft_lengths: Annotated[
        str, typer.Option(help="Fixed draft lengths beside auto, separated by commas.")
    ] = "0,1,2,4,6,8,12",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON Lines with a `prompt` in each row; one file for each kind."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="How many of each kind.")] = 2,
    max_new_tokens: opt.MaxNewTokens = 128,
    rounds: Annotated[int, typer.Option(help="Times each setting is measured.")] = 3,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    codec: opt.Codec = "auto",
    cache_policy: opt.CachePolicy = "lookahead",
    prefetch: opt.Prefetch = "three-phase",
    profile: opt.Profile = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Time per output token with fixed draft lengths and with auto, settings in rotation."""
    from speq.bench.runs import governor as bench_governor

    bench_governor.run(
        model,
        bench_governor.Settings(
            budgets=[part.strip() for part in budgets.split(",")],
            draft_lengths=draft_lengths,
            prompts=prompts or [],
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            run={
                "device": device,
                "dtype": dtype,
                "codec": codec,
                "cache_policy": cache_policy,
                "prefetch": prefetch,
                "profile": profile,
                "reader_threads": reader_threads,
            },
        ),
        json_file=json_file,
        force=force,
    ).print(bench_governor.COLUMNS)


@bench_app.command("governor-sim")
def governor_sim(
    trace: Annotated[Path, typer.Argument(help="Routes that `bench hit-rate --trace` recorded.")],
    settings: Annotated[int, typer.Option(help="Simulated machines and texts.")] = 300,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 2000,
    layers: Annotated[int, typer.Option(help="Of the recorded ones, so many are replayed.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the first setting.")] = 0,
    processes: Annotated[int, typer.Option(help="Settings simulated at a time.")] = 2,
    verdicts: Annotated[
        bool, typer.Option("--verdicts", help="Write what each setting came to as well.")
    ] = False,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """The governor against every fixed draft length, on simulated machines."""
    from speq.bench.replay import governor_sim as bench_governor_sim

    bench_governor_sim.run(
        bench_governor_sim.Settings(trace, settings, tokens, layers, seed, processes, verdicts),
        json_file=json_file,
        force=force,
    ).print(bench_governor_sim.COLUMNS)


@bench_app.command("paper-systems")
def paper_systems(
    models: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders with a config.json.")
    ],
    budgets: Annotated[
        str, typer.Option(help="Memory budgets, separated by commas.")
    ] = "16GB,40GB",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """The systems of MoE-SpeQ's Figure 13 as plans expect them, beside the paper's order."""
    from speq.bench.paper import paper_systems as bench_systems

    report = bench_systems.run(
        models,
        bench_systems.Settings([part.strip() for part in budgets.split(",")]),
        json_file=json_file,
        force=force,
    )
    report.print(bench_systems.COLUMNS)
    for note in bench_systems.notes(report):
        typer.echo(note)


@bench_app.command("widen")
def widen(
    source: opt.ModelArgument,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 2048,
    expert_width: Annotated[int, typer.Option(help="Width of an expert.")] = 1408,
    noise: Annotated[
        float, typer.Option(help="Between the copies of a weight, relative to the matrix; 0: none.")
    ] = 1.0,
    heads: Annotated[str, typer.Option(help="Attention heads: copy or keep.")] = "copy",
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
) -> None:
    """Write a model of real size that computes what a small trained one does, to measure on."""
    from speq.bench import widen as bench_widen
    from speq.units import format_bytes

    with opt.progress_bar() as progress:
        made = bench_widen.run(
            source,
            target,
            bench_widen.Settings(hidden, expert_width, noise, heads, seed),
            progress,
        )
    typer.echo(f"{made['path']}: {format_bytes(made['bytes'])}")
