"""`speq generate`: one prompt, its text as it comes, and what the run measured."""

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli import options as opt
from speq.cli.run_report import print_explanation, print_layers, print_summary
from speq.config import Model, RunConfig, SamplingParams
from speq.governor.explanation import explain
from speq.options.declared import Option, Options
from speq.options.kinds import File, Switch, Text

if TYPE_CHECKING:
    from speq.generator import Generator


@dataclass(frozen=True, slots=True)
class GenerateSettings(Options):
    """What is generated from, and what is shown of the run."""

    prompt: Annotated[str, Option("Text to go on from.", Text(wanted=None))]
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


def generate(
    model: Model,
    settings: GenerateSettings,
    run: RunConfig,
    sampling: SamplingParams,
    output: opt.Output,
) -> None:
    """Generate text from a prompt.

    The JSON object has text, token_ids, finish_reason and stats.
    """
    from speq.files.atomic_file import check_target
    from speq.measure.timeline import write_trace

    prompt = settings.prompt
    check_target(settings.trace, output.force)
    output.check()
    generator = opt.load_generator(model, run, first_request=(prompt, sampling.max_new_tokens))
    try:
        answer = _answer(generator, prompt, sampling, shown=not output.printed)
        output.write(answer)
        done = generator.last_run
        assert done is not None, "a run has ended"
        if settings.stats:
            print_layers(answer["stats"])
        if settings.explain:
            print_explanation(explain(done.steps), done.planned)
        if settings.trace is not None:
            write_trace(done, settings.trace)
            if done.trimmed:
                print(
                    f"speq: the timeline leaves out the first {done.trimmed} steps of the run",
                    file=sys.stderr,
                )
    finally:
        generator.close()


def _answer(
    generator: "Generator", prompt: str, sampling: SamplingParams, shown: bool
) -> dict[str, Any]:
    """Run the prompt. shown: write the text as it comes, then a short table."""
    finished: dict[str, Any] = {}
    pieces, ids = [], []
    with (
        opt.progress_bar() as progress,
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
        text = prompt
        for token in tokens:
            pieces.append(token.text)
            ids.append(token.id)
            if shown:
                sys.stdout.write(text + token.text)
                sys.stdout.flush()
            text = ""
    if shown:
        sys.stdout.write("\n")
        sys.stdout.flush()
        print_summary(finished["stats"])
    return {"text": "".join(pieces), "token_ids": ids, **finished}
