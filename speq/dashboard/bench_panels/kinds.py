"""Which file draws a bench, by what its JSON calls itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speq.dashboard.bench_panels import (
    ablation,
    batch,
    breakdown,
    budget,
    check,
    codec,
    coverage,
    drafters,
    equal_memory,
    fidelity,
    formats,
    governor,
    governor_sim,
    gpu_link,
    hit_rate,
    kernels,
    locality,
    memory,
    paper_systems,
    plain,
    prefill,
    schedule,
    serve,
    soak,
    step,
    tpot,
    tpot_systems,
    transfer,
)
from speq.dashboard.panel import Panel

Report = dict[str, Any]


def no_notes(report: Report) -> list[str]:
    """Nothing stands beside the pictures."""
    return []


@dataclass(frozen=True, slots=True)
class Kind:
    """How a bench is drawn, and what is said beside it. Both raise SpeqError for damage."""

    panels: Callable[[Report], list[Panel]]
    notes: Callable[[Report], list[str]] = no_notes


KINDS = {
    "ablation": Kind(ablation.panels, ablation.notes),
    "batch": Kind(batch.panels),
    "breakdown": Kind(breakdown.panels),
    "budget": Kind(budget.panels),
    "check": Kind(check.panels),
    "codec": Kind(codec.panels),
    "coverage": Kind(coverage.panels, coverage.notes),
    "dense kernels": Kind(kernels.panels),
    "drafters": Kind(drafters.panels, drafters.notes),
    "equal-memory": Kind(equal_memory.panels, equal_memory.notes),
    "fidelity": Kind(fidelity.panels, fidelity.notes),
    "formats": Kind(formats.panels, formats.notes),
    "governor": Kind(governor.panels),
    "governor-sim": Kind(governor_sim.panels),
    "gpu-link": Kind(gpu_link.panels),
    "hit-rate": Kind(hit_rate.panels),
    "kernels": Kind(kernels.panels),
    "locality": Kind(locality.panels),
    "memory": Kind(memory.panels),
    "paper-systems": Kind(paper_systems.panels),
    "prefill": Kind(prefill.panels),
    "schedule": Kind(schedule.panels),
    "serve": Kind(serve.panels),
    "soak": Kind(soak.panels),
    "step": Kind(step.panels),
    "tpot": Kind(tpot.panels, tpot.notes),
    "tpot-systems": Kind(tpot_systems.panels, tpot_systems.notes),
    "transfer": Kind(transfer.panels),
}
# Of benches that nothing is drawn of.
PLAIN = Kind(plain.panels)


def kind_of(bench: str) -> Kind:
    return KINDS.get(bench, PLAIN)
