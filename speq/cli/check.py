"""`speq check`: is our exact path the published model, on this machine, for this checkpoint?"""

from dataclasses import asdict
from typing import Annotated

import typer

from speq.cli.from_dataclass import Exclude
from speq.cli.options import Output
from speq.config import ExpertBudgetOptions, Model, RunConfig
from speq.measure.settings import CheckSettings
from speq.options.declared import option_names

# Texts are given, so that nothing is drafted, and it is the exact path that is checked.
UNUSED = (
    *("draft_length", "drafter", "head", "profile", "tpot_slo_ms", "latency_slo_ms"),
    *option_names(ExpertBudgetOptions),
)


def check(
    model: Model,
    settings: CheckSettings,
    run: Annotated[RunConfig, Exclude(without=UNUSED)],
    output: Output,
) -> None:
    """Compare our exact path, teacher-forced, with plain transformers.

    Fails where the two disagree by more than rounding. Where memory cannot hold the whole model,
    transformers' experts are read a layer at a time. A packed model is compared with its checksums,
    all of it.
    """
    from speq.measure import check as measure

    given = {name: value for name, value in asdict(run).items() if name not in UNUSED}
    with output.progress() as progress:
        report, verdict = measure.run(
            model,
            given.pop("memory_budget"),
            prompts=settings.prompts,
            num_prompts=settings.num_prompts,
            json_file=output.file,
            force=output.force,
            progress=progress,
            **given,
        )
    if output.printed:
        output.write(asdict(report))
    else:
        report.print(measure.columns_of(report))
        typer.echo(verdict.sentence)
    if not verdict.passed:
        raise typer.Exit(1)
