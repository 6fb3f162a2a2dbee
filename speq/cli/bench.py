"""`speq bench NAME`: measurements, each printed as a table and written as one JSON object."""

from pathlib import Path
from typing import Annotated

import typer

from speq.cli import options as opt
from speq.config import DEFAULT_READER_THREADS

bench_app = typer.Typer(
    help="Measure. Every bench prints a table; --json FILE keeps it.", no_args_is_help=True
)


@bench_app.callback()
def bench() -> None:
    """Measure. Every bench prints a table; --json FILE keeps it."""


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
    draft_kernel: opt.DraftKernel = "fused",
    cache_policy: opt.CachePolicy = "lru",
    prefetch: opt.Prefetch = "none",
    codec: opt.Codec = "auto",
    profile: opt.Profile = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Time per output token over memory budgets and draft lengths, settings in rotation."""
    from speq.bench import tpot as bench_tpot

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
                "draft_kernel": draft_kernel,
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


@bench_app.command("kernels")
def kernels(
    shapes: Annotated[
        str, typer.Option(help="Layers of models, separated by commas, or all.")
    ] = "all",
    rows: Annotated[str, typer.Option(help="Rows of a call, separated by commas.")] = "1,2,4,8,16",
    kernels: Annotated[str, typer.Option(help="Kernels, separated by commas, or all.")] = "all",
    group_size: Annotated[int, typer.Option(help="INT4 weights to one scale.")] = 128,
    dtype: Annotated[
        str, typer.Option(help="Of the rows: bfloat16, float16 or float32.")
    ] = "bfloat16",
    device: opt.Device = "auto",
    rounds: Annotated[int, typer.Option(help="Times each kernel is measured.")] = 15,
    isa: Annotated[
        str | None, typer.Option(help="Best instructions that CPU kernels may use, such as avx2.")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="For a layer's experts; of a larger layer fewer are held.")
    ] = "6GiB",
    reference: Annotated[
        bool, typer.Option("--reference", help="Time the slow reference where need be.")
    ] = False,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Expert kernels on layers of real shapes, beside a plain read of memory."""
    from speq.bench import kernels as bench_kernels
    from speq.bench.report import parse_numbers

    names = [part.strip() for part in shapes.split(",")]
    report = bench_kernels.run(
        bench_kernels.Settings(
            shapes=list(bench_kernels.SHAPES) if names == ["all"] else names,
            rows=parse_numbers("rows", rows),
            kernels=(
                list(bench_kernels.KERNELS)
                if kernels == "all"
                else [part.strip() for part in kernels.split(",")]
            ),
            group_size=group_size,
            dtype=dtype,
            device=device,
            rounds=rounds,
            isa=isa,
            memory=memory,
            reference=reference,
        ),
        json_file=json_file,
        force=force,
    )
    report.print(bench_kernels.COLUMNS)
    for note in bench_kernels.notes(report):
        typer.echo(note)


@bench_app.command("step")
def step(
    model: opt.ModelArgument,
    memory_budget: opt.MemoryBudget,
    draft_length: opt.DraftLength = "auto",
    draft_kernel: opt.DraftKernel = "fused",
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 4,
    max_new_tokens: opt.MaxNewTokens = 64,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Where the time of a draft token and of a verification goes, part by part."""
    from speq.bench import step as bench_step

    bench_step.run(
        model,
        bench_step.Settings(
            memory_budget=memory_budget,
            draft_length=draft_length,
            draft_kernel=draft_kernel,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            device=device,
            dtype=dtype,
        ),
        json_file=json_file,
        force=force,
    ).print(bench_step.COLUMNS)


@bench_app.command("transfer")
def transfer(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Model folders, packed or plain.")
    ],
    readers: Annotated[
        str, typer.Option(help="Reads at a time, numbers separated by commas.")
    ] = "1,2,4,8",
    sizes: Annotated[
        str, typer.Option(help="Sizes of plain reads, separated by commas; the largest counts.")
    ] = "256KiB,16MiB",
    volume: Annotated[str, typer.Option(help="Read for each measurement.")] = "256MiB",
    rounds: Annotated[int, typer.Option(help="Times each setting is measured.")] = 9,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Experts from disk into slots, beside plain reads of the same files past the page cache."""
    from speq.bench import transfer as bench_transfer
    from speq.bench.report import parse_numbers

    bench_transfer.run(
        models,
        bench_transfer.Settings(
            readers=parse_numbers("readers", readers),
            sizes=[part.strip() for part in sizes.split(",")],
            volume=volume,
            rounds=rounds,
        ),
        json_file=json_file,
        force=force,
    ).print(bench_transfer.COLUMNS)


@bench_app.command("prefill")
def prefill(
    model: opt.ModelArgument,
    budgets: Annotated[str, typer.Option(help="Memory budgets, separated by commas.")],
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 1000,
    prompts: opt.Prompts = None,
    rounds: Annotated[int, typer.Option(help="Times each budget is measured.")] = 3,
    dtype: opt.Dtype = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Time to first token of a long prompt, beside the floor that link and arithmetic set."""
    from speq.bench import prefill as bench_prefill

    bench_prefill.run(
        model,
        bench_prefill.Settings(
            budgets=[part.strip() for part in budgets.split(",")],
            prompt_tokens=prompt_tokens,
            prompts=prompts,
            rounds=rounds,
            dtype=dtype,
            reader_threads=reader_threads,
        ),
        json_file=json_file,
        force=force,
    ).print(bench_prefill.COLUMNS)


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
    from speq.bench import hit_rate as bench_hit_rate

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
    from speq.bench import locality as bench_locality
    from speq.bench.report import parse_numbers

    report = bench_locality.run(
        trace,
        bench_locality.Settings(parse_numbers("windows", windows), parse_numbers("slots", slots)),
        json_file=json_file,
        force=force,
    )
    report.print(bench_locality.COLUMNS)
    for note in bench_locality.notes(report):
        typer.echo(note)


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
    from speq.bench import paper_systems as bench_systems

    report = bench_systems.run(
        models,
        bench_systems.Settings([part.strip() for part in budgets.split(",")]),
        json_file=json_file,
        force=force,
    )
    report.print(bench_systems.COLUMNS)
    for note in bench_systems.notes(report):
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
    from speq.bench import schedule as bench_schedule

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


@bench_app.command("codec")
def codec(
    model: opt.ModelArgument,
    draft: opt.DraftOption = "auto",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """What each codec makes of the model's experts: bits a weight, and how fast."""
    from speq.bench import codec as bench_codec

    with opt.progress_bar() as progress:
        report = bench_codec.run(model, draft, json_file=json_file, force=force, progress=progress)
    report.print(bench_codec.COLUMNS)


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
    from speq.bench import equal_memory as bench_equal_memory

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
    from speq.bench import governor as bench_governor

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
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """The governor against every fixed draft length, on simulated machines."""
    from speq.bench import governor_sim as bench_governor_sim
    from speq.bench.report import print_table

    report, summary = bench_governor_sim.run(
        bench_governor_sim.Settings(trace, settings, tokens, layers, seed, processes),
        json_file=json_file,
        force=force,
    )
    print_table(f"{report.bench}: {report.model}", bench_governor_sim.COLUMNS, [summary])


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
    from speq.bench import fidelity as bench_fidelity

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
    from speq.config import format_bytes

    with opt.progress_bar() as progress:
        made = bench_widen.run(
            source,
            target,
            bench_widen.Settings(hidden, expert_width, noise, heads, seed),
            progress,
        )
    typer.echo(f"{made['path']}: {format_bytes(made['bytes'])}")
