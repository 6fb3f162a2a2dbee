"""Where the time of decoding goes: waiting for experts, drafting, verifying; MoE-SpeQ's Figure 4.

At each budget two systems run in rotation:

    on demand  words in LRU slots, fetched when a layer asks for them, and no draft
    auto       as users run the model

Shares are of the time in decode steps (`StepStats.duration_s`), summed over the texts of a round:

    waiting    `stall_s`: the computation waited for experts
    drafting   `draft_s`
    verifying  `verify_s` without `stall_s`: the exact model computed, and tokens were chosen
    the rest   what is left: the governor, keeping tokens, and Python around all of it

A step is verified after it is drafted, and waits while it is verified, so the four add up to 1. A
row has the shares of the round whose time per token is the median (of two in the middle, the
faster): medians of each share would not add up. The spread is that of the time per token over
rounds: the slowest less the fastest, over the median.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.neighbours import disturbed
from speq.bench.rotation import rotated
from speq.bench.settings import BreakdownSettings as Settings
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.stats import RunStats, ratio
from speq.units import Progress, format_bytes, parse_bytes, track

WARM_UP_TOKENS = 8
SYSTEMS: dict[str, dict[str, Any]] = {
    "on demand": {
        "draft_length": 0,
        "draft": "none",
        "codec": "raw",
        "dense": "raw",
        "cache_policy": "lru",
        "prefetch": "none",
        "packed_copy": "none",
        "profile": "none",
    },
    "auto": {},
}
# Of `auto` alone. What else may be given says how the model computes, whoever runs it.
OWN = frozenset(SYSTEMS["on demand"]) | {"draft_dense", "drafter", "graphs"}

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "system": ("system", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "spread": ("spread", "{:.0%}"),
    "waiting": ("waiting", "{:.1%}"),
    "drafting": ("drafting", "{:.1%}"),
    "verifying": ("verifying", "{:.1%}"),
    "the rest": ("rest", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "hidden": ("hidden_share", "{:.1%}"),
}


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time in decode steps; together 1."""

    waiting: float
    drafting: float
    verifying: float
    rest: float

    @classmethod
    def of(cls, decode_s: float, stall_s: float, draft_s: float, verify_s: float) -> "Shares":
        """verify_s: the stalls included."""
        waiting, drafting, verified = stall_s / decode_s, draft_s / decode_s, verify_s / decode_s
        return cls(waiting, drafting, verified - waiting, 1 - drafting - verified)


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's texts in one round."""

    tpot_ms: float
    shares: Shares
    moved_bytes_per_token: float
    hidden_share: float | None

    @classmethod
    def of(cls, runs: Sequence[RunStats]) -> "Sample":
        """From runs that decoded at least one step, all together."""

        def total(name: str) -> float:
            return float(sum(run.total(name) for run in runs))

        tokens, decode_s = total("emitted"), total("duration_s")
        return cls(
            tpot_ms=decode_s / tokens * 1e3,
            shares=Shares.of(decode_s, total("stall_s"), total("draft_s"), total("verify_s")),
            moved_bytes_per_token=total("moved_bytes") / tokens,
            hidden_share=ratio(total("link_s") - total("exposed_s"), total("link_s")),
        )


@disturbed
def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Measure both systems at every budget. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    cells = [*product(settings.budgets, SYSTEMS)]
    for budget, system in cells:
        RunConfig.of(budget, **options_of(system, settings))
    samples: dict[tuple[str, str], list[Sample]] = {cell: [] for cell in cells}
    turns = [cell for turn in range(settings.rounds) for cell in rotated(cells, turn)]
    for cell in track("measuring systems", turns, len(turns), progress):
        samples[cell].append(measure(model, settings, *cell, prompts))
    rows = [summarise(*cell, samples[cell]) for cell in cells]
    report = Report("breakdown", model, settings.as_json(), rows)
    if json_file is not None:
        report.write(json_file)
    return report


def options_of(system: str, settings: Settings) -> dict[str, Any]:
    """Those of a run of it."""
    if system == "auto":
        return settings.run
    shared = {name: value for name, value in settings.run.items() if name not in OWN}
    return shared | SYSTEMS[system]


def measure(model: str, settings: Settings, budget: str, system: str, prompts: list[str]) -> Sample:
    """All prompts, the slots warm from one before that does not count."""
    if system != "auto":
        model = settings.published or model
    generator = Generator.from_pretrained(model, budget, **options_of(system, settings))
    try:
        return Sample.of(runs_of(generator, prompts, settings.max_new_tokens, WARM_UP_TOKENS))
    except SpeqError as error:
        raise SpeqError(f"budget {budget}, {system}: {error}") from error
    finally:
        generator.close()


def summarise(budget: str, system: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """One row: the round in the middle, and how far the others are from it."""
    in_order = sorted(samples, key=lambda sample: sample.tpot_ms)
    middle = in_order[(len(in_order) - 1) // 2]
    times = [sample.tpot_ms for sample in in_order]
    hidden = [sample.hidden_share for sample in samples if sample.hidden_share is not None]
    return {
        "budget": budget,
        "budget_bytes": parse_bytes(budget),
        "system": system,
        "tpot_ms": median(times),
        "spread": (times[-1] - times[0]) / median(times),
        **asdict(middle.shares),
        "moved_bytes_per_token": median(s.moved_bytes_per_token for s in samples),
        "hidden_share": median(hidden) if hidden else None,
        "rounds": len(samples),
    }
