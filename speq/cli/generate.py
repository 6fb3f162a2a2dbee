"""`speq generate`: one prompt, its text as it comes, and what the run measured."""

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt
from speq.cli.run_report import print_explanation, print_layers, print_summary
from speq.config import DEFAULT_READER_THREADS
from speq.governor.explanation import explain

if TYPE_CHECKING:
    from speq.generator import Generator

logger = logging.getLogger("speq")


def generate(
    model: opt.Model,
    memory_budget: opt.MemoryBudget,
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on from; `-` reads it from standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File with that text in UTF-8, of any length; its last line end is cut."),
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    context_length: opt.ContextLength = None,
    draft: opt.DraftOption = "auto",
    draft_length: opt.DraftLength = "auto",
    tpot_slo: opt.TpotSlo = None,
    latency_slo: opt.LatencySlo = None,
    cache_policy: opt.CachePolicy = "lru",
    prefetch: opt.Prefetch = "none",
    codec: opt.Codec = "auto",
    profile: opt.Profile = "auto",
    verify_reads: opt.VerifyReads = False,
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt before its text.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no figures, no log but errors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, token_ids, stats.")
    ] = False,
    show_stats: Annotated[
        bool, typer.Option("--stats", help="Also show, by layer, where experts came from.")
    ] = False,
    show_decisions: Annotated[
        bool, typer.Option("--explain", help="Also show which draft lengths were chosen, and why.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a timeline of the run, which Perfetto opens (ui.perfetto.dev)."),
    ] = None,
    force: opt.Force = False,
) -> None:
    """Generate text from a prompt."""
    from speq.config import SamplingParams
    from speq.files.atomic_file import check_target
    from speq.measure.timeline import write_trace

    # Options are checked before a model takes minutes to load.
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
    }
    SamplingParams(**sampling)
    check_target(trace, force)
    with opt.log_of(quiet):
        text = prompt_of(prompt, prompt_file)
        generator = opt.load_generator(
            model,
            memory_budget,
            quiet,
            first_request=(text, max_new_tokens),
            device=device,
            dtype=dtype,
            context_length=context_length,
            draft=draft,
            draft_length=draft_length,
            tpot_slo_ms=tpot_slo,
            latency_slo_ms=latency_slo,
            cache_policy=cache_policy,
            prefetch=prefetch,
            codec=codec,
            profile=profile,
            verify_reads=verify_reads,
            reader_threads=reader_threads,
        )
        with contextlib.closing(generator):
            if as_json:
                _print_object(generator, text, sampling)
            else:
                stats = _stream(generator, text, sampling, echo, quiet)
                if not quiet:
                    print_summary(stats)
            run = generator.last_run
            assert run is not None, "a run has ended"
            if show_stats:
                print_layers(run.summary())
            if show_decisions:
                print_explanation(explain(run.steps), run.planned)
            if trace is not None:
                write_trace(run, trace)
                if run.trimmed:
                    logger.warning(
                        "the timeline leaves out the first %d steps of the run", run.trimmed
                    )


def prompt_of(prompt: str | None, prompt_file: Path | None) -> str:
    """The one prompt that was given. Raises SpeqError where there is none, or two."""
    from speq.errors import SpeqError

    if (prompt is None) == (prompt_file is None):
        given = "neither" if prompt is None else "both"
        raise SpeqError(f"give one of --prompt and --prompt-file; {given} was given")
    if prompt_file is not None:
        try:
            text = prompt_file.read_bytes().decode()
        except OSError as error:
            raise SpeqError(
                f"prompt file {prompt_file} cannot be read: {error.strerror}; give a text file"
            ) from error
        except UnicodeDecodeError as error:
            raise SpeqError(
                f"prompt file {prompt_file} is not in UTF-8 (byte {error.start}); convert it"
            ) from error
    elif prompt == "-":
        text = sys.stdin.read()
    else:
        return str(prompt)
    return text.removesuffix("\n").removesuffix("\r")


def _print_object(generator: "Generator", prompt: str, sampling: dict[str, Any]) -> None:
    result = generator.generate(prompt, **sampling)
    answer = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats,
    }
    print(json.dumps(answer))


def _stream(
    generator: "Generator", prompt: str, sampling: dict[str, Any], echo: bool, quiet: bool
) -> dict[str, Any]:
    """Write the text as it comes; what the run measured."""
    finished: dict[str, Any] = {}
    with (
        opt.progress_bar(quiet) as progress,
        contextlib.closing(
            generator.stream(
                prompt,
                progress=progress,
                on_finish=lambda reason, stats: finished.update(stats),
                **sampling,
            )
        ) as tokens,
    ):
        # Nothing is written before it is known that the prompt can be run.
        text = prompt if echo else ""
        for token in tokens:
            sys.stdout.write(text + token.text)
            sys.stdout.flush()
            text = ""
    sys.stdout.write("\n")
    sys.stdout.flush()
    return finished
