"""Options that several commands share, and how a command gets its generator."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.config import (
    CACHE_POLICIES,
    CODECS,
    DEVICES,
    DRAFT_KERNELS,
    DTYPES,
    PREFETCH_MODES,
)

if TYPE_CHECKING:
    from speq.generator import Generator
    from speq.units import Progress

Model = Annotated[str, typer.Option("--model", help="Model folder or hub id.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub id.")]
MemoryBudget = Annotated[
    str, typer.Option(help="Memory for everything on the device, such as 8GiB.")
]
Device = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")]
Dtype = Annotated[
    str, typer.Option(help=f"Compute dtype: {', '.join(DTYPES)}; auto is the checkpoint's.")
]
ContextLength = Annotated[
    int | None, typer.Option(help="Tokens the KV cache holds; default: what the request needs.")
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        help="auto, none, or the folder or hub id of a GPTQ checkpoint, or of one to round.",
    ),
]
DraftLength = Annotated[
    str, typer.Option(help="Tokens drafted per step: a number, or auto: chosen by measurement.")
]
TpotSlo = Annotated[
    float | None,
    typer.Option("--tpot-slo", help="With auto: time per token, at most, in milliseconds."),
]
LatencySlo = Annotated[
    float | None,
    typer.Option(
        "--latency-slo",
        help="With auto: until the first tokens after the prompt's, and between bursts of tokens, "
        "at most, in milliseconds.",
    ),
]
CachePolicy = Annotated[str, typer.Option(help=f"One of {', '.join(CACHE_POLICIES)}.")]
Prefetch = Annotated[str, typer.Option(help=f"One of {', '.join(PREFETCH_MODES)}.")]
Codec = Annotated[
    str,
    typer.Option(
        help=f"How exact experts lie in slots, one of {', '.join(CODECS)}; a packed model's is its "
        "own."
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        help="What `speq tune` measured, to choose codec, draft and its length by: auto (what is "
        "kept for this model, device and budget), none, or a file."
    ),
]
DraftKernel = Annotated[
    str,
    typer.Option(help=f"How the draft runs, {' or '.join(DRAFT_KERNELS)}; unfused is a baseline."),
]
VerifyReads = Annotated[
    bool, typer.Option("--verify-reads", help="Compare experts with the checksums of a pack.")
]
ReaderThreads = Annotated[
    int, typer.Option(help="Experts read from disk at a time, on the device cpu.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(help="Sample from tokens at least this likely, beside the likeliest.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Makes tokens of the prompt and the text less likely; 1: off.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken off the logit of a token that was generated; 0: off.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="The same for each time that it was generated; 0: off.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Prompts = Annotated[Path | None, typer.Option(help="JSON Lines with a `prompt` in each row.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace that file.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past an end of text.")]


# Time left is told by the pace of so long: layers and settings take a minute or more.
SPEED_PERIOD_S = 600


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator["Progress"]:
    """Shows long work (making a draft, running a long prompt) on stderr, with time left.

    Shows nothing where stderr is no terminal, and never touches what is written to stdout.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        console=console,
        transient=True,
        speed_estimate_period=SPEED_PERIOD_S,
        refresh_per_second=4,  # beside what is measured
        # By default text for stdout comes out of the console, which is stderr here.
        redirect_stdout=False,
        disable=quiet or not console.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def report(label: str, done: int, total: int) -> None:
        if label not in tasks:
            if done >= total:
                return
            bar.start()
            # Work that was done before tells nothing of the speed.
            tasks[label] = bar.add_task(label, total=total, completed=done)
        bar.update(tasks[label], completed=done, total=total)
        if done >= total:
            bar.remove_task(tasks.pop(label))
            if not tasks:
                bar.stop()

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


@contextlib.contextmanager
def log_of(quiet: bool) -> Iterator[None]:
    """The log as it is, or nothing but errors meanwhile."""
    with contextlib.ExitStack() as stack:
        for name in ("speq", "transformers") if quiet else ():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def load_generator(
    model: str, memory_budget: str, quiet: bool = False, **options: Any
) -> "Generator":
    from speq.generator import Generator

    with progress_bar(quiet) as progress:
        return Generator.from_pretrained(model, memory_budget, progress=progress, **options)
