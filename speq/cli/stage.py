"""`speq stage`: some layers of a model, for a run that another machine has begun."""

from typing import Annotated

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.config import ComputeOptions, DraftOptions, ExpertBudgetOptions, Model, RunConfig
from speq.options.declared import option_names
from speq.pipeline.settings import StageSettings

# Decided by the first stage, or of no use to the others.
DECIDED = (
    *option_names(ComputeOptions, DraftOptions, ExpertBudgetOptions),
    *("context_length", "host_budget", "max_batch", "packed_copy", "prefix_reuse"),
    *("prefix_cache", "prefix_cache_limit"),
)


def stage(
    model: Model,
    settings: StageSettings,
    run: Annotated[RunConfig, Exclude(without=DECIDED)],
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Run some layers of a model for a command that was given --stages elsewhere.

    It ends when the first stage closes the run. What a run over all stages is like is decided
    there; how this machine holds its layers is decided here.
    """
    from speq.pipeline.later_stage import run_stage

    with output.progress() as progress:
        run_stage(model, run, settings, output.note, progress)
