"""What drafts gain in steps of several texts (MoESD, Huang et al., NeurIPS 2025), measured here.

Passes of the exact model over B texts without drafts and with them, T_T(B, 1) and T_T(B, k + 1);
the experts that layers are asked for, beside N(t); tokens a second; and how well Algorithm 1 tells
speed-ups of settings that it was not fitted to. Every setting writes the same texts, B of them at
a time. Figures are of steps that all B texts share: behind the last prompt, and until one of them
has all its tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from bench.lab.command import main
from bench.lab.options import BudgetText, FixedLengths
from bench.lab.speedup_fit import Measurement, fit_speedup, modelled_speedup
from speq.bench.kinds import texts_of
from speq.bench.neighbours import beside_neighbours
from speq.bench.rotation import rotate
from speq.bench.settings import Neighbours, PromptKinds, numbers
from speq.config import RunConfig, SamplingParams
from speq.engine.batch import Batch
from speq.engine.request import Request
from speq.errors import OptionError, SpeqError
from speq.generator import Generator
from speq.governor.batches import longest_draft
from speq.governor.speedup_model import activated_experts, target_efficiency
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report, medians_of
from speq.measure.settings import MaxNewTokens, Rounds
from speq.options.declared import Nested, Option, Options
from speq.options.kinds import Whole
from speq.stats import StepStats, ratio
from speq.units import Progress, track


@dataclass(frozen=True, slots=True)
class BatchBenchSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    batches: Annotated[
        tuple[int, ...], Option("Texts that run side by side.", numbers(Whole(1, 64), "1,4"))
    ] = (1, 2, 4, 8)
    draft_lengths: FixedLengths = (1, 2, 4, 6)
    prompts: PromptKinds = ()
    num_prompts: Annotated[
        int, Option("How many of each kind, in whole batches of all.", Whole(1))
    ] = 8
    max_new_tokens: MaxNewTokens = 48
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft_nodes", "draft", "profile", "max_batch"),
                *("tpot_slo_ms", "latency_slo_ms"),
            ),
        ),
    ] = field(default_factory=dict)


PLAIN, HELD, AUTO = "0", "0, held", "auto"
# Of the cells with drafts, every so manyth is told by Algorithm 1 and not fitted to.
HELD_OUT = 4

COLUMNS: dict[str, Column] = {
    "texts": ("texts", "{}"),
    "k": ("draft_length", "{}"),
    "tokens/s": ("tokens_per_s", "{:.1f}"),
    "least": ("tokens_per_s_least", "{:.1f}"),
    "most": ("tokens_per_s_most", "{:.1f}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "verify ms": ("verify_ms", "{:.1f}"),
    "draft ms": ("draft_ms", "{:.1f}"),
    "target efficiency": ("target_efficiency", "{:.3f}"),
    "tokens a step": ("accept_length", "{:.2f}"),
    "experts": ("distinct", "{:.1f}"),
    "N(t)": ("independent", "{:.1f}"),
    "rows an expert": ("tokens_per_expert", "{:.2f}"),
    "MB a token": ("moved_mb", "{:.2f}"),
    "of plain": ("speedup", "{:.3f}"),
    "of held": ("speedup_held", "{:.3f}"),
    "Algorithm 1": ("modelled", "{:.3f}"),
    "fitted": ("fitted", "{}"),
}
TEXTS, LENGTH = (Axis("texts", "texts"),), (Axis("draft_length", "draft length"),)
SPEED = Axis("tokens_per_s", "tokens a second")
COST = Axis("target_efficiency", "time of one token's pass over a verification's")
EXPERTS = (Axis("distinct", "asked for"), Axis("independent", "of independent tokens, N(t)"))
PICTURES = (
    Picture(
        *("speed", "Tokens a second of all texts together", TEXTS, (SPEED,), LENGTH),
        low="tokens_per_s_least",
        high="tokens_per_s_most",
        mark="points",
    ),
    Picture("efficiency", "What it costs to verify", TEXTS, (COST,), LENGTH, mark="lines"),
    Picture(
        *(
            "experts",
            "Distinct experts of a layer",
            (Axis("rows_mean", "rows of a pass"),),
            EXPERTS,
        ),
        mark="lines",
    ),
)


@dataclass(slots=True)
class BatchReport(Report):
    """rows: of each number of texts, each draft length.

    speedup        tokens a second beside those of no draft at all, with the same texts
    speedup_held   beside those of no drafting while the draft is held: T_AR / T_SD of MoESD
    algorithm      of Algorithm 1: parameters, the cells that it was fitted to and not, and the mean
                   error of both; or why it was not fitted
    """

    algorithm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchCell:
    texts: int
    draft_length: str

    @property
    def drafted(self) -> int | None:
        """Tokens that are drafted at most; None: the governor says."""
        if self.draft_length == AUTO:
            return None
        return 0 if self.draft_length in (PLAIN, HELD) else int(self.draft_length)


@beside_neighbours
def run(model: str, settings: BatchBenchSettings, progress: Progress | None = None) -> BatchReport:
    """Measure every number of texts with every draft length. Raises SpeqError for nonsense
    settings.
    """
    check_batches(settings)
    prompts = [prompt for _, prompt in texts_of(settings.prompts, settings.num_prompts)]
    if len(prompts) % max(settings.batches):
        raise OptionError(
            f"there are {len(prompts)} prompts, which are no whole batches of "
            f"{max(settings.batches)}; give another num_prompts"
        )
    turns = [
        (turn, loaded)
        for turn in range(settings.rounds)
        for loaded in rotate([PLAIN, HELD, AUTO], turn)
    ]
    samples: dict[BatchCell, list[dict[str, Any]]] = {}
    experts = (0, 0)
    for turn, loaded in track("measuring batches", turns, len(turns), progress):
        generator = Generator.from_pretrained(
            model, settings.memory_budget, **options_of(loaded, settings)
        )
        try:
            shape = generator.runtime.shape
            experts = (shape.experts.num_experts, shape.top_k)
            for cell in rotate(cells_of(loaded, settings), turn):
                steps = steps_of(generator, cell, prompts, settings.max_new_tokens)
                samples.setdefault(cell, []).append(sample_of(cell, steps, experts[1]))
        finally:
            generator.close()
    order = [
        cell
        for texts in settings.batches
        for length in [PLAIN, HELD, *map(str, settings.draft_lengths), AUTO]
        for cell in [BatchCell(texts, length)]
        if cell in samples
    ]
    rows = rows_of({cell: samples[cell] for cell in order}, *experts)
    algorithm = fitted(rows, *experts)
    return BatchReport("batch", model, settings.as_json(), rows, algorithm=algorithm)


def check_batches(settings: BatchBenchSettings) -> None:
    """Raise SpeqError for batches and drafts that do not go together."""
    largest = max(settings.batches)
    for texts in settings.batches:
        if largest % texts:
            raise OptionError(
                f"batches has {texts} and {largest}, of which the one is no multiple of the other; "
                "give numbers that divide the largest one"
            )
    longest = max(settings.draft_lengths)
    most = longest_draft(MAX_LINEAR_ROWS, largest)
    if longest > most:
        raise OptionError(
            f"draft_lengths has {longest} and batches has {largest}: so many texts draft {most} "
            "tokens each at most; give smaller ones"
        )
    if settings.max_new_tokens <= largest + longest + 1:
        raise OptionError(
            f"max_new_tokens is {settings.max_new_tokens}, and texts have written up to {largest} "
            f"before all {largest} are there; give more than {largest + longest + 1}"
        )


def options_of(loaded: str, settings: BatchBenchSettings) -> dict[str, Any]:
    """What a generator is loaded with: without a draft, with one by name, or as users get it."""
    given = dict(settings.run) | {"profile": "none", "max_batch": max(settings.batches)}
    if loaded == PLAIN:
        return given | {"draft": "none", "drafter": "none", "draft_length": "0"}
    if loaded == HELD:
        named = given["drafter"] if given.get("drafter", "auto") != "auto" else "int4"
        return given | {"drafter": named, "draft_length": str(max(settings.draft_lengths))}
    return given | {"draft_length": "auto"}


def cells_of(loaded: str, settings: BatchBenchSettings) -> list[BatchCell]:
    """What is measured with a generator."""
    lengths = {
        PLAIN: [PLAIN],
        HELD: [HELD, *map(str, settings.draft_lengths)],
        AUTO: [AUTO],
    }[loaded]
    return [BatchCell(texts, length) for length in lengths for texts in settings.batches]


def steps_of(
    generator: Generator, cell: BatchCell, prompts: list[str], max_new_tokens: int
) -> list[StepStats]:
    """Run all texts, so many at a time; the steps that a whole batch shares."""
    encoded = [generator.encode(prompt) for prompt in prompts]
    # Near its end a text would draft less than is asked for.
    room = max_new_tokens + generator.runtime.longest_draft + 1
    generator.reserve(max(map(len, encoded)) + room)
    sampling = SamplingParams(max_new_tokens=room, ignore_eos=True)
    steps: list[StepStats] = []
    for first in range(0, len(encoded), cell.texts):
        together = [Request(ids, sampling) for ids in encoded[first : first + cell.texts]]
        steps.extend(shared_steps(generator, cell.drafted, together, max_new_tokens))
    return steps


def shared_steps(
    generator: Generator, draft_length: int | None, texts: list[Request], max_new_tokens: int
) -> Iterator[StepStats]:
    """One batch: nobody drafts until the last prompt was run, and then all, until a text has so
    many tokens.
    """
    recorder = generator.runtime.recorder
    with generator.batch() as batch:
        for text in texts:
            batch.add(text)
        while len(batch.running) < len(texts):
            step(batch, 0)
        while all(len(text.output_token_ids) < max_new_tokens for text in texts):
            step(batch, draft_length)
            yield recorder.step
        batch.clear()


def step(batch: Batch, draft_length: int | None) -> None:
    """Raises what ended a text."""
    for emitted in batch.step(draft_length):
        if emitted.error is not None:
            raise emitted.error


def sample_of(cell: BatchCell, steps: Sequence[StepStats], top_k: int) -> dict[str, Any]:
    """Figures of one turn of a cell."""

    def total(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps))

    spent_s = sum(step.duration_s for step in steps)
    accept_length = total("emitted") / len(steps) / cell.texts
    distinct = total("requests") / total("layers")
    rows = total("rows") / len(steps)
    return {
        "steps": len(steps),
        "tokens_per_s": total("emitted") / spent_s,
        "tpot_ms": spent_s / total("emitted") * cell.texts * 1e3,
        "verify_ms": total("verify_s") / len(steps) * 1e3,
        "draft_ms": total("draft_s") / len(steps) * 1e3,
        "draft_length_mean": total("draft_length") / len(steps) / cell.texts,
        "acceptance_rate": ratio(total("accepted"), total("draft_length")),
        "accept_length": accept_length,
        "accepted_share": accept_length / (cell.drafted + 1) if cell.drafted else None,
        "rows_mean": rows,
        "distinct": distinct,
        "tokens_per_expert": rows * top_k / distinct,
        "moved_mb": total("moved_bytes") / total("emitted") / 1e6,
        "hit_rate": ratio(total("hits"), total("requests")),
    }


def rows_of(
    samples: dict[BatchCell, list[dict[str, Any]]], num_experts: int, top_k: int
) -> list[dict[str, Any]]:
    """Medians over rounds, and what cells are beside each other."""
    found = {cell: medians(each) for cell, each in samples.items()}
    fewest = found[BatchCell(min(cell.texts for cell in found), PLAIN)]
    rows = []
    for cell, figures in found.items():
        plain, held = found[BatchCell(cell.texts, PLAIN)], found[BatchCell(cell.texts, HELD)]
        efficiency = target_efficiency(held["verify_ms"], figures["verify_ms"])
        speed = figures["tokens_per_s"]
        beside = {
            "independent": activated_experts(num_experts, top_k, figures["rows_mean"]),
            "target_efficiency": efficiency if cell.drafted else None,
            "speedup": speed / plain["tokens_per_s"],
            "speedup_held": speed / held["tokens_per_s"],
            "of_fewest": speed / fewest["tokens_per_s"],
            "modelled": None,
            "fitted": None,
        }
        rows.append({"texts": cell.texts, "draft_length": cell.draft_length} | figures | beside)
    return rows


def medians(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Over rounds, with the spread of the speed."""
    speeds = [sample["tokens_per_s"] for sample in samples]
    return medians_of(samples, samples[0]) | {
        "tokens_per_s_least": min(speeds),
        "tokens_per_s_most": max(speeds),
    }


def fitted(rows: list[dict[str, Any]], num_experts: int, top_k: int) -> dict[str, Any]:
    """Fit Algorithm 1 to most cells with drafts; give these rows, and the others, what it says."""
    drafting = [row for row in rows if row["accepted_share"] is not None]
    settings = [
        Measurement(
            row["texts"],
            int(row["draft_length"]),
            top_k,
            num_experts,
            row["accepted_share"],
            row["speedup_held"],
        )
        for row in drafting
    ]
    batches = sorted({each.batch for each in settings})
    lengths = sorted({each.draft_length for each in settings})
    # Along diagonals, so that each number of texts and each length is fitted to somewhere.
    left_out = [
        (batches.index(each.batch) + lengths.index(each.draft_length)) % HELD_OUT == HELD_OUT - 1
        for each in settings
    ]
    given = [each for each, out in zip(settings, left_out, strict=True) if not out]
    try:
        parameters = fit_speedup(given)
    except SpeqError as error:
        return {"not_fitted": str(error)}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row, each, out in zip(drafting, settings, left_out, strict=True):
        row["modelled"] = modelled_speedup(parameters, each)
        row["fitted"] = "no" if out else "yes"
        errors[out].append(abs(row["modelled"] / each.speedup - 1))
    return {
        "parameters": asdict(parameters),
        "fitted_to": len(given),
        "held_out": len(settings) - len(given),
        "error_fitted": sum(errors[False]) / len(errors[False]),
        "error_held_out": sum(errors[True]) / len(errors[True]) if errors[True] else None,
    }


def notes(report: BatchReport) -> list[str]:
    """What readers of the table need to know besides."""
    found = []
    most = max(row["texts"] for row in report.rows)
    for row in report.rows:
        if row["texts"] == most and row["draft_length"] == PLAIN:
            found.append(
                f"{most} texts, no draft: {row['of_fewest']:.2f} times the tokens of the fewest"
            )
    algorithm = report.algorithm
    if "not_fitted" in algorithm:
        return [*found, f"Algorithm 1 was not fitted: {algorithm['not_fitted']}"]
    said = (
        f"Algorithm 1 is off by {algorithm['error_fitted']:.1%} on {algorithm['fitted_to']} cells"
    )
    if algorithm["error_held_out"] is not None:
        said += (
            f" that it was fitted to, and by {algorithm['error_held_out']:.1%} on "
            f"{algorithm['held_out']} others"
        )
    return [*found, said]


if __name__ == "__main__":
    main("batch")
