"""What each part of speq is worth: the same texts without it, after MoE-SpeQ's Table 4.

    full                  as users run the model: `auto`, but for what is given
    async prefetch        experts are fetched when a layer asks for them
    fused kernel          the draft calls a kernel for each expert and projection, and no pass is a
                          graph
    both                  neither of the two, as in the paper
    lookahead eviction    the least recently used expert leaves
    governor              every step drafts as many tokens
    compact slots         experts and dense matrices are plain words
    INT4 dense layers     the draft runs the exact dense layers
    draft                 plain decoding

Rows but the first are without the part that they name. Each row's `auto` weighs again what to hold:
with more memory for slots it may draft no more, for example. Settings run in rotation. The share of
full is taken within a round, and then the median over rounds; the spread is that of the time per
token over rounds: the slowest less the fastest, over the median.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

from bench.lab.command import main
from bench.lab.options import BudgetText, Published
from bench.lab.step import DRAFT_KERNELS
from speq.bench.neighbours import beside_neighbours
from speq.bench.rotation import rotate
from speq.bench.settings import Neighbours
from speq.config import MAX_DRAFT_LENGTH, DraftLength, RunConfig
from speq.errors import OptionError, SpeqError
from speq.generator import Generator
from speq.measure.picture import LOWER_IS_FASTER, MOVED, TPOT, Axis, Picture
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.measure.settings import MaxNewTokens, NumPrompts, Prompts, Rounds
from speq.options.declared import Nested, Option, Options
from speq.options.kinds import Whole
from speq.runtime import Runtime
from speq.stats import RunStats, ratio
from speq.units import Progress, format_bytes, track


@dataclass(frozen=True, slots=True)
class AblationSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    published: Published = None
    draft_length: DraftLength = None
    fixed_length: Annotated[
        int, Option("Tokens drafted per step without the governor.", Whole(0, MAX_DRAFT_LENGTH))
    ] = 4
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft", "tpot_slo_ms", "latency_slo_ms"),
                *("cache_policy", "prefetch"),
            ),
        ),
    ] = field(default_factory=dict)


WARM_UP_TOKENS = 8
FULL = "full"

COLUMNS: dict[str, Column] = {
    "without": ("without", "{}"),
    "tokens/s": ("tokens_per_s", "{:.2f}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "spread": ("spread", "{:.0%}"),
    "norm.": ("of_full", "{:.1%}"),
    "k": ("draft_length_mean", "{:.1f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
}
WITHOUT = (Axis("without", "without"),)
PICTURES = (
    Picture("tpot", "Time per output token", WITHOUT, (TPOT,), aid=LOWER_IS_FASTER),
    Picture("moved", "Bytes moved per token", WITHOUT, (MOVED,)),
)


def nothing(runtime: Runtime) -> None:
    """All is as it was loaded."""


def unfuse(runtime: Runtime) -> None:
    """Raises SpeqError where no INT4 experts are held."""
    if runtime.draft_backend is None:
        raise OptionError("no draft of INT4 experts is held at this budget")
    runtime.draft_backend.kernel = DRAFT_KERNELS["unfused"]


@dataclass(frozen=True, slots=True)
class AblatedPart:
    """Something to be without. options: of the run; change: made to what was loaded for it."""

    name: str
    options: dict[str, Any]
    change: Callable[[Runtime], None] = nothing

    def config(self, settings: AblationSettings) -> dict[str, Any]:
        """All options of the run."""
        return {"draft_length": settings.draft_length} | settings.run | self.options

    @property
    def plain(self) -> bool:
        """Whether it runs on words as published."""
        return self.options.get("codec") == "raw"


def parts_of(settings: AblationSettings) -> list[AblatedPart]:
    """Rows in order, the first with nothing left out."""
    on_demand, launched = {"prefetch": "none"}, {"graphs": "none"}
    return [
        AblatedPart(FULL, {}),
        AblatedPart("async prefetch", on_demand),
        AblatedPart("fused kernel", launched, unfuse),
        AblatedPart("both", on_demand | launched, unfuse),
        AblatedPart("lookahead eviction", {"cache_policy": "lru"}),
        AblatedPart("governor", {"draft_length": settings.fixed_length}),
        AblatedPart("compact slots", {"codec": "raw", "dense": "raw"}),
        AblatedPart("INT4 dense layers", {"draft_dense": "none"}),
        AblatedPart("draft", {"drafter": "none", "draft_length": 0}),
    ]


@dataclass(frozen=True, slots=True)
class AblationSample:
    """One setting's texts in one round."""

    tpot_ms: float
    draft_length_mean: float
    acceptance_rate: float | None
    moved_bytes_per_token: float

    @classmethod
    def of(cls, runs: Sequence[RunStats]) -> "AblationSample":
        """From runs that decoded at least one step, all together."""

        def total(name: str) -> float:
            return float(sum(run.total(name) for run in runs))

        emitted = total("emitted")
        return cls(
            tpot_ms=total("duration_s") / emitted * 1e3,
            draft_length_mean=total("draft_length") / sum(len(run.decode) for run in runs),
            acceptance_rate=ratio(total("accepted"), total("draft_length")),
            moved_bytes_per_token=total("moved_bytes") / emitted,
        )


@beside_neighbours
def run(model: str, settings: AblationSettings, progress: Progress | None = None) -> Report:
    """Measure the model whole and without each part.

    A setting that is refused has a row that says why. Raises SpeqError for nonsense settings, and
    where the whole is refused.
    """
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    parts = parts_of(settings)
    for part in parts:
        RunConfig.of(settings.memory_budget, **part.config(settings))
    samples: dict[str, list[AblationSample]] = {part.name: [] for part in parts}
    refused: dict[str, str] = {}
    turns = [part for turn in range(settings.rounds) for part in rotate(parts, turn)]
    for part in track("measuring settings", turns, len(turns), progress):
        if part.name in refused:
            continue
        try:
            samples[part.name].append(measure(model, settings, part, prompts))
        except SpeqError as error:
            if part.name == FULL:
                raise
            refused[part.name] = str(error)
    rows = [
        summarise(part.name, samples[part.name], samples[FULL], refused.get(part.name))
        for part in parts
    ]
    return Report("ablation", model, settings.as_json(), rows)


def measure(
    model: str, settings: AblationSettings, part: AblatedPart, prompts: list[str]
) -> AblationSample:
    """All prompts, the slots warm from one before that does not count."""
    source = settings.published if part.plain and settings.published else model
    generator = Generator.from_pretrained(source, settings.memory_budget, **part.config(settings))
    try:
        longest = max(len(generator.encode(prompt)) for prompt in prompts)
        generator.reserve(longest + settings.max_new_tokens)  # arenas that are changed then stay
        part.change(generator.runtime)
        return AblationSample.of(
            runs_of(generator, prompts, settings.max_new_tokens, WARM_UP_TOKENS)
        )
    finally:
        generator.close()


def summarise(
    name: str,
    samples: Sequence[AblationSample],
    full: Sequence[AblationSample],
    refused: str | None,
) -> dict[str, Any]:
    """One row: medians over rounds.

    refused  why the setting could not be measured; figures are then None
    """
    figures: dict[str, Any] = dict.fromkeys(
        ("tokens_per_s", "tpot_ms", "spread", "of_full", "draft_length_mean", "acceptance_rate")
    )
    figures["moved_bytes_per_token"] = None
    if refused is None:
        times = [sample.tpot_ms for sample in samples]
        rates = [s.acceptance_rate for s in samples if s.acceptance_rate is not None]
        figures = {
            "tokens_per_s": 1e3 / median(times),
            "tpot_ms": median(times),
            "spread": (max(times) - min(times)) / median(times),
            "of_full": median(f.tpot_ms / s.tpot_ms for f, s in zip(full, samples, strict=True)),
            "draft_length_mean": median(sample.draft_length_mean for sample in samples),
            "acceptance_rate": median(rates) if rates else None,
            "moved_bytes_per_token": median(s.moved_bytes_per_token for s in samples),
        }
    return {"without": "nothing" if name == FULL else name} | figures | {"refused": refused}


def notes(report: Report) -> list[str]:
    """Which rows say less than they seem to."""
    lines = [
        f"without {row['without']}: not measured: {row['refused']}"
        for row in report.rows
        if row["refused"] is not None
    ]
    if not report.rows[0]["draft_length_mean"]:
        lines.append("nothing was drafted here; --drafter int4 drafts where auto expects no gain")
    return lines


if __name__ == "__main__":
    main("ablation")
