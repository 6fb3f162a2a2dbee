"""`speq stage`: some layers of a model, for a run that another machine has begun."""

from typing import Annotated

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.config import Model, RunConfig
from speq.pipeline.settings import StageSettings

# Decided by the first stage, or of no use to the others.
DECIDED = (
    *("device", "dtype", "context_length", "max_batch", "prefix_reuse"),
    *("draft", "draft_dense", "draft_experts", "draft_counts", "draft_length", "draft_nodes"),
    "prune_rows",
    *("expert_budget", "expert_floor", "expert_policy", "expert_ranking", "expert_counts"),
    *("expert_rows", "expert_residents", "expert_audit"),
    *("drafter", "head", "graphs", "packed_copy", "profile", "host_budget"),
    *("tpot_slo_ms", "latency_slo_ms"),
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
