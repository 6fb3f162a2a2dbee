"""`speq profile`: one run, recorded: a timeline, its figures, and a page of pictures."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from speq.cli import options as opt
from speq.cli.generate import PromptFile, PromptText, prompt_of, write_timeline
from speq.cli.run_report import print_summary
from speq.config import Model, RunConfig, SamplingParams
from speq.errors import present
from speq.options.declared import Option, Options
from speq.options.kinds import File

TRACE, RUN, PAGE = "trace.json", "run.json", "report.html"


@dataclass(frozen=True, slots=True)
class ProfileSettings(Options):
    """What is run, and where its record goes."""

    out: Annotated[Path, Option("Folder to write into.", File("a folder"))]
    prompt: PromptText = None
    prompt_file: PromptFile = None


def profile(
    model: Model,
    settings: ProfileSettings,
    run: RunConfig,
    sampling: SamplingParams,
    output: opt.Output,
) -> None:
    """Record a run: trace.json for Perfetto, run.json, and report.html, a page of pictures.

    The JSON object has the figures of the run and the paths of these files.
    """
    from speq.dashboard.page import write_page
    from speq.dashboard.recording import Recording
    from speq.dashboard.run_panels.run_page import page_of

    files = {name: settings.out / name for name in (TRACE, RUN, PAGE)}
    output.check(*files.values())
    with opt.log_of(output.quiet):
        prompt = prompt_of(settings.prompt, settings.prompt_file)
        first = prompt, sampling.max_new_tokens
        generator = opt.load_generator(model, run, first, output.quiet)
        with contextlib.closing(generator):
            with Recording(generator) as recording, opt.progress_bar(output.quiet) as progress:
                tokens = recording.stream(prompt, **asdict(sampling))
                for count, _ in enumerate(tokens, start=1):
                    progress("generating", count, sampling.max_new_tokens)
                done = present(generator.last_run, "a sequence has ended and left no run")
                record = present(recording.record(), "a run has ended and left no record")
            with contextlib.ExitStack() as undo:
                write_timeline(done, files[TRACE], record.link)
                undo.callback(files[TRACE].unlink)
                record.write(files[RUN])
                undo.callback(files[RUN].unlink)
                write_page(page_of(record), files[PAGE])
                undo.pop_all()  # without all three the same command would refuse those there are
    paths = {name: str(path) for name, path in files.items()}
    output.write({"stats": record.stats, "files": paths})
    if not output.printed:
        if not output.quiet:
            print_summary(record.stats)
        output.note(f"look at {files[PAGE]}; {files[TRACE]} opens in ui.perfetto.dev")
