"""`speq generate`: one prompt, its text as it comes, and what the run measured."""

import contextlib
import logging
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.cli.live import Live, check_live, text_writer, write_text
from speq.cli.machines import ONE_MODEL, check_machines, open_generator
from speq.cli.run_report import (
    print_approximation,
    print_explanation,
    print_layers,
    print_summary,
)
from speq.cli.sampling import AS_THE_MODEL, AskedSampling, sampling_line
from speq.config import Model, RunConfig, SamplingParams
from speq.errors import FileError, OptionError, present
from speq.governor.explanation import explain
from speq.options.declared import Option, Options
from speq.options.kinds import File, Switch, Text
from speq.pipeline.settings import StagesSettings
from speq.ray.settings import RaySettings

if TYPE_CHECKING:
    from speq.generator import Generator
    from speq.stats import RunStats

logger = logging.getLogger("speq")

# One prompt needs no batch and no template, and nothing reuses its prefix.
ONE_PROMPT = Exclude(
    without=(
        *("max_batch", "prefix_reuse", "prefix_cache", "prefix_cache_limit"),
        *("tokenizer", "chat_template", "tool_syntax"),
    )
)
PromptText = Annotated[
    str | None,
    Option("Text to go on from; `-` reads it from standard input.", Text(wanted=None)),
]
PromptFile = Annotated[
    Path | None,
    Option(
        "File with that text in UTF-8, of any length; its last line end is cut.",
        File("a text file", readable=True),
    ),
]


@dataclass(frozen=True, slots=True)
class GenerateSettings(Options):
    """The prompt, and what is shown of the run."""

    prompt: PromptText = None
    prompt_file: PromptFile = None
    echo: Annotated[bool, Option("Write the prompt before its text.", Switch())] = False
    stats: Annotated[bool, Option("Also show, by layer, where experts came from.", Switch())] = (
        False
    )
    explain: Annotated[
        bool, Option("Also show which draft lengths were chosen, and why.", Switch())
    ] = False
    trace: Annotated[
        Path | None,
        Option("Write a timeline of the run, which Perfetto opens (ui.perfetto.dev).", File()),
    ] = None
    live: Live = False


def generate(
    model: Model,
    settings: GenerateSettings,
    run: Annotated[RunConfig, ONE_PROMPT],
    sampling: Annotated[AskedSampling, AS_THE_MODEL],
    machines: StagesSettings,
    cluster: Annotated[RaySettings, ONE_MODEL],
    output: opt.Output,
) -> None:
    """Generate text from a prompt.

    The JSON object has text, token_ids, finish_reason, stats and seed.
    """
    from speq.files.atomic_file import check_target

    check_target(settings.trace, output.force)
    output.check()
    check_machines(machines, cluster, replicas=False)
    live = check_live(settings.live, output.quiet)
    # No chunk of the prompt is cut for a later one.
    run = replace(run, prefix_reuse="none")
    with opt.log_of(output.quiet):
        prompt = prompt_of(settings.prompt, settings.prompt_file)
        first = prompt, sampling.max_new_tokens
        with open_generator(model, run, machines, cluster, first, output.quiet) as generator:
            shown = not output.printed
            echoed = prompt if settings.echo else ""
            params = sampling.params(generator)
            answer = _answer(generator, prompt, params, echoed, live, output)
            output.write(answer | {"seed": params.seed})
            if shown and not output.quiet:
                print_summary(answer["stats"])
                if not params.greedy:
                    print(sampling_line(params), file=sys.stderr)
            print_approximation(answer["stats"])
            done = present(generator.last_run, "a text has ended and left no run")
            if settings.stats:
                print_layers(answer["stats"])
            if settings.explain:
                print_explanation(explain(done.steps), done.planned)
            if settings.trace is not None:
                write_timeline(done, settings.trace, generator.runtime.link)


def write_timeline(run: "RunStats", path: Path, link: Literal["disk", "PCIe"]) -> None:
    """Write a run's timeline, and say what it leaves out. Raises SpeqError as `write_trace`."""
    from speq.measure.timeline import write_trace

    write_trace(run, path, link)
    if run.trimmed:
        logger.warning("the timeline leaves out the first %d steps of the run", run.trimmed)


def prompt_of(prompt: str | None, prompt_file: Path | None) -> str:
    """The one prompt that was given. Raises SpeqError where there is none, or two."""

    if (prompt is None) == (prompt_file is None):
        given = "neither" if prompt is None else "both"
        raise OptionError(f"give one of --prompt and --prompt-file; {given} was given")
    if prompt_file is not None:
        try:
            text = prompt_file.read_bytes().decode()
        except OSError as error:
            raise FileError(
                f"prompt file {prompt_file} cannot be read: {error.strerror}; give a text file"
            ) from error
        except UnicodeDecodeError as error:
            raise FileError(
                f"prompt file {prompt_file} is not in UTF-8 (byte {error.start}); convert it"
            ) from error
    elif prompt == "-":
        text = sys.stdin.read()
    else:
        return str(prompt)
    return text.removesuffix("\n").removesuffix("\r")


def _answer(
    generator: "Generator",
    prompt: str,
    sampling: SamplingParams,
    echoed: str,
    live: bool,
    output: opt.Output,
) -> dict[str, Any]:
    """Run the prompt, and write the text as it comes. echoed: what goes before it."""
    shown = not output.printed
    finished: dict[str, Any] = {}
    pieces, ids = [], []
    with (
        opt.progress_bar(output.quiet) as progress,
        text_writer(generator, live) as write,
        contextlib.closing(
            generator.stream(
                prompt,
                progress=progress,
                on_finish=lambda reason, stats: finished.update(finish_reason=reason, stats=stats),
                **asdict(sampling),
            )
        ) as tokens,
    ):
        # Nothing is written before it is known that the prompt can be run.
        text = echoed
        for token in tokens:
            pieces.append(token.text)
            ids.append(token.id)
            if shown:
                write(text + token.text)
            text = ""
    if shown:
        write_text("\n")
    return {"text": "".join(pieces), "token_ids": ids, **finished}
