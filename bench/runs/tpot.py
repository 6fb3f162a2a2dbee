"""Time per output token over memory budgets: of draft lengths, or of systems beside each other.

Settings are rotated within a run, so that a machine that slows down or speeds up meanwhile favours
none of them; each figure is the median over its measurements.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from speq.bench.kinds import texts_of
from speq.bench.neighbours import neighbours
from speq.bench.rivals.tpot import NamedSystems, SystemsReport
from speq.bench.rivals.tpot import run as systems_beside
from speq.bench.rotation import rotate
from speq.bench.runs import specter
from speq.bench.runs.specter import SpecterReport
from speq.bench.settings import TpotSettings as Settings
from speq.bench.synthetic import WHAT_IF, synthetic_acceptance
from speq.config import RunConfig
from speq.errors import OptionError, SpeqError
from speq.generator import Generator
from speq.measure.picture import (
    ACCEPTED,
    BUDGET,
    HITS,
    MOVED,
    TPOT,
    TTFT,
    Axis,
    Picture,
    percent,
)
from speq.measure.report import Column, Report, medians_of, print_table
from speq.measure.runs import runs_of
from speq.options.assignments import parse_assignments
from speq.options.declared import declared_options
from speq.stats import ratio
from speq.units import Progress, format_bytes, parse_bytes, track

MEDIANS = (
    "tpot_ms",
    "ttft_ms",
    "acceptance_rate",
    "accept_length_mean",
    "route_recall",
    "hit_rate",
    "coverage",
    "moved_bytes_per_token",
    "prefill_moved_bytes",
    "hidden_share",
    "stall_s",
    "draft_s",
    "verify_s",
)

WARM_UP_TOKENS = 8
# Of the measurements, so many take no longer than `tpot_p90_ms`.
MOST = 0.9

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "k": ("draft_length", "{}"),
    "neighbours": ("neighbours", "{}"),
    "variant": ("variant", "{}"),
    "codec": ("codec", "{}"),
    "dense": ("dense", "{}"),
    "slots": ("slots_bytes", format_bytes),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "p90 ms": ("tpot_p90_ms", "{:.1f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "hidden": ("hidden_share", "{:.1%}"),
    "waiting": ("stall_share", "{:.0%}"),
    "drafting": ("draft_share", "{:.0%}"),
    "verifying": ("verify_share", "{:.0%}"),
}


VARYING = (Axis("draft_length", "draft length"), Axis("neighbours", "neighbours"))
SETTING = (*VARYING, Axis("variant", "variant"))
SHARES = (
    percent("stall_share", "waiting for experts"),
    percent("draft_share", "drafting"),
    percent("verify_share", "verifying"),
)
PICTURES = (
    Picture(
        *("tpot", "Time per output token", (BUDGET,), (TPOT,), SETTING),
        high="tpot_p90_ms",
        mark="points",
        aid="Lower is faster: an error bar goes up to what 9 of 10 measurements kept within.",
    ),
    Picture("moved", "Bytes moved per token", (BUDGET,), (MOVED,), SETTING, aid="Lower is less."),
    Picture(
        *("shares", "Where the time of decoding goes", (BUDGET, *SETTING), SHARES),
        mark="stack",
        aid="What is missing to 100% is the governor, sampling, and Python around all of it.",
    ),
    Picture("ttft", "Time to first token", (BUDGET,), (TTFT,), SETTING, aid="Lower is sooner."),
    Picture("hit-rate", "Experts that lay in slots when needed", (BUDGET,), (HITS,), SETTING),
    Picture("acceptance", "Accepted drafts", (BUDGET,), (ACCEPTED,), SETTING),
)


@dataclass(frozen=True, slots=True)
class TpotCell:
    """What is measured in turn. variant: options of its own, as users give them."""

    budget: str
    draft_length: str
    neighbours: int
    variant: str

    def options(self, settings: Settings) -> dict[str, Any]:
        """Those of the run. Raises SpeqError for what is no option."""
        named = f"variant {self.variant!r}"
        return settings.run | parse_assignments(
            named, self.variant.split(), declared_options(RunConfig)
        )


def run(model: str, settings: Settings, progress: Progress | None = None) -> Report:
    """Measure every budget with every draft length, number of neighbours and variant, or with every
    system that is named; or a protocol.

    Raises SpeqError for nonsense settings.
    """
    if settings.protocol is not None:
        return specter.run(model, settings, progress)
    if not settings.budgets and settings.systems != ("?",):
        raise OptionError("budgets must be given, such as 8GiB,12GiB; or a protocol, which has own")
    if settings.systems:
        return systems_beside(model, settings, progress)
    prompts = [text for _, text in texts_of(settings.prompts, settings.num_prompts)]
    cells = [
        TpotCell(*each)
        for each in product(
            settings.budgets,
            settings.draft_lengths,
            settings.neighbours,
            settings.variants or ("",),
        )
    ]
    for cell in cells:
        RunConfig.of(cell.budget, cell.draft_length, **cell.options(settings))

    samples: dict[TpotCell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    turns = [cell for turn in range(settings.rounds) for cell in rotate(cells, turn)]
    for cell in track("measuring settings", turns, len(turns), progress):
        with neighbours(cell.neighbours):
            samples[cell] += measure(model, settings, cell, prompts)
    rows = [summarise(cell, samples[cell], settings.synthetic_acceptance) for cell in cells]
    return Report("tpot", model, settings.as_json(), rows)


def measure(
    model: str, settings: Settings, cell: TpotCell, prompts: list[str]
) -> list[dict[str, Any]]:
    """The stats of each prompt, the caches warm from a prompt before that does not count."""
    generator = Generator.from_pretrained(
        model,
        cell.budget,
        draft_length=cell.draft_length,
        **cell.options(settings),
    )
    try:
        acceptance = settings.synthetic_acceptance
        with synthetic_acceptance(generator, prompts, settings.max_new_tokens, acceptance):
            runs = runs_of(generator, prompts, settings.max_new_tokens, WARM_UP_TOKENS)
        return [run.summary() | {"decode_s": float(run.total("duration_s"))} for run in runs]
    except SpeqError as error:
        raise SpeqError(
            f"budget {cell.budget}, draft length {cell.draft_length}: {error}"
        ) from error
    finally:
        generator.close()


def summarise(
    cell: TpotCell, samples: list[dict[str, Any]], acceptance: float | None = None
) -> dict[str, Any]:
    """One row: medians over all samples, and what the budget bought.

    acceptance  that drafts were given; rows of runs that drafted nothing say None
    """
    memory = samples[0]["memory"]
    row: dict[str, Any] = {
        "budget": cell.budget,
        "budget_bytes": parse_bytes(cell.budget),
        "draft_length": cell.draft_length,
        "neighbours": cell.neighbours,
        "variant": cell.variant,
        "codec": samples[0]["codec"],
        "dense": samples[0]["dense"],
        "draft_bytes": memory["draft"],
        "slots_bytes": memory["slots"],
        "samples": len(samples),
    }
    row |= medians_of(samples, MEDIANS) | shares_of(samples)
    times = sorted(sample["tpot_ms"] for sample in samples)
    row["tpot_p90_ms"] = times[math.ceil(MOST * len(times)) - 1]
    row["synthetic_acceptance"] = None if row["acceptance_rate"] is None else acceptance
    return row


def shares_of(samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Shares of the time in decode steps, over all samples. A verification waits while it lasts."""

    def total(name: str) -> float:
        return float(sum(sample[name] for sample in samples))

    waited_s, decode_s = total("stall_s"), total("decode_s")
    return {
        "stall_share": ratio(waited_s, decode_s),
        "draft_share": ratio(total("draft_s"), decode_s),
        "verify_share": ratio(total("verify_s") - waited_s, decode_s),
    }


def show(report: Report) -> None:
    """The table, which says so where acceptance was not the draft's own."""
    if isinstance(report, SystemsReport | NamedSystems | SpecterReport):
        report.print_all()
        return
    acceptance = report.settings["synthetic_acceptance"]
    if acceptance is None:
        report.print(COLUMNS)
        return
    columns = COLUMNS | {"set to": ("synthetic_acceptance", "{:g}")}
    title = f"{report.bench}: {report.model}\n{WHAT_IF.format(acceptance)}"
    print_table(title, columns, report.rows)


def notes(report: Report) -> list[str]:
    """What-if runs say what was set; systems say on which terms they ran, and which failed."""
    if isinstance(report, SystemsReport | NamedSystems | SpecterReport):
        return report.remarks()
    acceptance = report.settings["synthetic_acceptance"]
    if acceptance is None:
        return []
    said = WHAT_IF.format(acceptance)
    return [f"{said}: each drafted token is right with that probability, if those before it are"]
