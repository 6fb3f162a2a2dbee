"""The governor on the engine itself: every fixed draft length beside `auto`.

A fixed length of 0 runs without a draft, whose memory goes to slots: what no governor can do once
the draft is there, and the planner does before, by a profile. So there are two more settings: 0
with the draft held, and, where `speq tune` has measured the budget, `auto` by its profile.

Settings take turns, prompt kind by prompt kind and budget by budget, so that a machine that slows
down or speeds up meanwhile favours none of them. Each run goes on from a warm one of its own that
does not count, but for `auto`, whose calibration is part of what is measured.
"""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.kinds import prompts_by_kind
from speq.bench.neighbours import disturbed
from speq.bench.replay import single_shot
from speq.bench.rotation import rotated
from speq.bench.settings import GovernorSettings as Settings
from speq.devices.named import device_named
from speq.errors import SpeqError
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.governor.explanation import explain
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.models.opened import open_model
from speq.planning import profiles
from speq.stats import ratio
from speq.units import Progress, parse_bytes, tracked

AUTO, TUNED, HELD = "auto", "tuned", "0, held"
WARM_UP_TOKENS = 8

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "prompts": ("kind", "{}"),
    "k": ("draft_length", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "least": ("tpot_least_ms", "{:.1f}"),
    "most": ("tpot_most_ms", "{:.1f}"),
    "of the best": ("of_best", "{:.3f}"),
    "with a draft": ("of_drafting", "{:.3f}"),
    "mean k": ("draft_length_mean", "{:.2f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "forecast off by": ("forecast_error", "{:.1%}"),
}


@disturbed
@single_shot.offered()
def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Measure every cell with every draft length. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    fixed = [*map(str, settings.draft_lengths), HELD]
    kinds = {"mixed": read_prompts(None, settings.num_prompts)}
    if settings.prompts:
        kinds = prompts_by_kind(settings.prompts, settings.num_prompts)
    tuned = tuned_budgets(model, settings)
    cells = [(budget, kind) for budget in settings.budgets for kind in kinds]
    samples: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    turns = []
    for turn in range(settings.rounds):
        for budget, kind in cells:
            lengths = [*fixed, AUTO, *([TUNED] if budget in tuned else [])]
            turns += [(budget, kind, length) for length in rotated(lengths, turn)]
    for cell in tracked("measuring settings", turns, len(turns), progress):
        budget, kind, length = cell
        measured = measure(model, settings, budget, length, kinds[kind])
        samples.setdefault(cell, []).append(measured)
    rows = []
    for budget, kind in cells:
        found = {
            length: medians(samples[budget, kind, length])
            for length in (*fixed, AUTO, TUNED)
            if (budget, kind, length) in samples
        }
        best = min(found[length]["tpot_ms"] for length in fixed)
        drafting = min(found[length]["tpot_ms"] for length in fixed if length != "0")
        for length, row in found.items():
            head = {"budget": budget, "kind": kind, "draft_length": length}
            of = {"of_best": row["tpot_ms"] / best, "of_drafting": row["tpot_ms"] / drafting}
            rows.append(head | row | of)
    given = settings.as_json()
    report = Report("governor", model, given, rows)
    if json_file is not None:
        report.write(json_file)
    return report


def tuned_budgets(model: str, settings: Settings) -> set[str]:
    """Those that a profile is there for. Raises SpeqError where a budget is no size."""
    opened, option = open_model(model), settings.run["profile"]
    device = device_named(settings.run["device"]).torch.type
    try:
        return {
            budget
            for budget in settings.budgets
            if profiles.find(option, opened, device, parse_bytes(budget)) is not None
        }
    finally:
        opened.close()


def measure(
    model: str, settings: Settings, budget: str, length: str, prompts: list[str]
) -> dict[str, Any]:
    """All prompts, one after the other, as one stretch of time."""
    given = dict(settings.run)
    if length != TUNED:
        given["profile"] = "none"
    fixed = length not in (AUTO, TUNED, HELD)
    if length == HELD:
        given["drafter"] = "int4"  # asked for by name, a draft is held wherever it fits
    generator = Generator.from_pretrained(
        model,
        budget,
        draft="none" if length == "0" else "auto",
        draft_length=length if fixed else "auto",
        **given,
    )
    held = generator.with_draft_length(0) if length == HELD else nullcontext()
    try:
        with held:
            warm_up = 0 if length in (AUTO, TUNED) else WARM_UP_TOKENS
            runs = runs_of(generator, prompts, settings.max_new_tokens, warm_up)
    except SpeqError as error:
        raise SpeqError(f"budget {budget}, draft length {length}: {error}") from error
    finally:
        generator.close()
    steps = [step for run in runs for step in run.decode]
    explained = explain(steps)

    def total(name: str) -> float:
        return float(sum(run.total(name) for run in runs))

    return {
        "tpot_ms": total("duration_s") / total("emitted") * 1e3,
        "draft_length_mean": total("draft_length") / len(steps),
        "acceptance_rate": ratio(total("accepted"), total("draft_length")),
        "forecast_error": explained.error,
        "serial_error": explained.serial_error,
        "overlapped_error": explained.overlapped_error,
        "cycles": dict(Counter(str(step.draft_length) for step in steps)),
        "last_reason": steps[-1].reason,
        "planned": runs[-1].planned,
    }


def medians(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Over rounds, with the spread of the times; what is no number is the last round's."""
    row: dict[str, Any] = dict(samples[-1])
    for name, last in samples[-1].items():
        if isinstance(last, float):
            row[name] = median(s[name] for s in samples if s[name] is not None)
    times = [sample["tpot_ms"] for sample in samples]
    return row | {
        "tpot_least_ms": min(times),
        "tpot_most_ms": max(times),
        "samples": len(samples),
    }
