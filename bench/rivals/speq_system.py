"""speq itself as a contestant, with whatever options its entry gives."""

from collections.abc import Mapping
from typing import Any

from speq.bench.rivals.contestant import Contestant
from speq.bench.rivals.generator_contestant import GeneratorContestant
from speq.bench.rivals.job import RivalJob
from speq.errors import NoRoom
from speq.generator import Generator


def load(job: RivalJob) -> Contestant:
    """Raises SpeqError where options, files or the memory do not allow it."""
    generator = Generator.from_pretrained(
        job.model, job.memory_bytes, **run_options(job, job.options)
    )
    generator.reserve(job.context)
    fixed = generator.runtime.config.draft_length
    if fixed and not generator.runtime.residency_plan.drafts:
        generator.close()
        raise NoRoom(
            f"{job.memory_bytes} bytes leave no room for the draft of this system, which drafts "
            f"{fixed} tokens; give it a larger budget"
        )
    if job.finish_copy:
        generator.runtime.finish_copy()
    return GeneratorContestant(generator)


def run_options(job: RivalJob, options: Mapping[str, Any]) -> Any:
    """Options of a run under this job."""
    return {**options, "device": job.device, "dtype": job.dtype}
