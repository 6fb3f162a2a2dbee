"""Time per output token over memory budgets and draft lengths.

Settings are rotated within a run, so that a machine that slows down or speeds up meanwhile favours
none of them; each figure is the median over its measurements.
"""

from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.neighbours import neighbours
from speq.bench.replay import single_shot
from speq.bench.rotation import rotated
from speq.bench.settings import TpotSettings as Settings
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.units import Progress, format_bytes, parse_bytes, tracked

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
    "stall_s",
    "draft_s",
    "verify_s",
)

WARM_UP_TOKENS = 8
# A budget, a draft length, and how many neighbours.
Cell = tuple[str, str, int]

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "k": ("draft_length", "{}"),
    "neighbours": ("neighbours", "{}"),
    "codec": ("codec", "{}"),
    "slots": ("slots_bytes", format_bytes),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "stall s": ("stall_s", "{:.2f}"),
}


@single_shot.offered()
def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Measure every budget with every draft length and number of neighbours.

    Raises SpeqError for nonsense settings.
    """
    check_target(json_file, force)
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    cells = list(product(settings.budgets, settings.draft_lengths, settings.neighbours))
    for budget, length, _ in cells:
        RunConfig.of(budget, length, **settings.run)

    samples: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    turns = [cell for turn in range(settings.rounds) for cell in rotated(cells, turn)]
    for cell in tracked("measuring settings", turns, len(turns), progress):
        budget, length, count = cell
        with neighbours(count):
            samples[cell] += measure(model, settings, budget, length, prompts)
    rows = [summarise(cell, samples[cell]) for cell in cells]
    report = Report(
        "tpot",
        model,
        settings.as_json(),
        rows,
    )
    if json_file is not None:
        report.write(json_file)
    return report


def measure(
    model: str, settings: Settings, budget: str, length: str, prompts: list[str]
) -> list[dict[str, Any]]:
    """The stats of each prompt, the caches warm from a prompt before that does not count."""
    generator = Generator.from_pretrained(
        model,
        budget,
        draft_length=length,
        **settings.run,
    )
    try:
        runs = runs_of(generator, prompts, settings.max_new_tokens, WARM_UP_TOKENS)
        return [run.summary() for run in runs]
    except SpeqError as error:
        raise SpeqError(f"budget {budget}, draft length {length}: {error}") from error
    finally:
        generator.close()


def summarise(cell: Cell, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: medians over all samples, and what the budget bought."""
    budget, length, count = cell
    memory = samples[0]["memory"]
    row: dict[str, Any] = {
        "budget": budget,
        "budget_bytes": parse_bytes(budget),
        "draft_length": length,
        "neighbours": count,
        "codec": samples[0]["codec"],
        "draft_bytes": memory["draft"],
        "slots_bytes": memory["slots"],
        "samples": len(samples),
    }
    for name in MEDIANS:
        values = [sample[name] for sample in samples if sample[name] is not None]
        row[name] = median(values) if values else None
    return row
