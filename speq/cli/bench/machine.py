"""What a machine gives: kernels, passes, transfers, prompts, codecs."""

from typing import Annotated

import typer

from speq.cli import options as opt
from speq.cli.bench.app import bench_app
from speq.config import DEFAULT_READER_THREADS


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
    from speq.bench.machine import kernels as bench_kernels
    from speq.measure.report import parse_numbers

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
    draft_kernel: Annotated[
        str, typer.Option(help="How the draft runs, fused or unfused; unfused is a baseline.")
    ] = "fused",
    prompts: opt.Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them.")] = 4,
    max_new_tokens: opt.MaxNewTokens = 64,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """Where the time of a draft token and of a verification goes, part by part."""
    from speq.bench.machine import step as bench_step

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
    from speq.bench.machine import transfer as bench_transfer
    from speq.measure.report import parse_numbers

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
    from speq.bench.machine import prefill as bench_prefill

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


@bench_app.command("codec")
def codec(
    model: opt.ModelArgument,
    draft: opt.DraftOption = "auto",
    json_file: opt.JsonFile = None,
    force: opt.Force = False,
) -> None:
    """What each codec makes of the model's experts: bits a weight, and how fast."""
    from speq.bench.machine import codec as bench_codec

    with opt.progress_bar() as progress:
        report = bench_codec.run(model, draft, json_file=json_file, force=force, progress=progress)
    report.print(bench_codec.COLUMNS)
