"""Mixtral-Offloading-SC: as many raw slots as MoE-SpeQ has beside its draft, and no draft.

The draft's memory lies idle then, as on a machine whose draft runs on another device.
"""

from dataclasses import replace

from speq.bench.rivals import speq_system
from speq.bench.rivals.contestant import Contestant
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.systems import PAPER
from speq.generator import Generator


def load(job: RivalJob) -> Contestant:
    """Raises SpeqError where MoE-SpeQ's draft has no room either."""
    return speq_system.load(replace(job, memory_bytes=job.memory_bytes - draft_bytes(job)))


def draft_bytes(job: RivalJob) -> int:
    """What MoE-SpeQ's draft takes of the job's memory."""
    options = job.options | PAPER
    paper = Generator.from_pretrained(
        job.model, job.memory_bytes, **speq_system.run_options(job, options)
    )
    try:
        paper.reserve(job.context)
        return paper.runtime.plan.report()["draft"]
    finally:
        paper.close()
