"""All drafters beside each other, on the same texts and under the same budgets.

What a drafter proposes is counted in a pass over the texts that is not timed. Timed rounds follow
in rotation. Texts are the exact model's own, greedy or drawn by the same seeds, whoever drafts.
`auto` learns anew in each round, and its probes are in its time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from bench.lab.command import main
from bench.lab.draft_counts import DraftCounts, counting
from bench.lab.options import BUDGET_OPTIONS, FixedLength
from speq.bench.kinds import texts_of
from speq.bench.rotation import rotate
from speq.bench.settings import Budgets, PromptKinds
from speq.config import MAX_DRAFT_NODES, RunConfig
from speq.engine.drafters.head import HeadDrafter
from speq.errors import Broken, NoRoom, OptionError, SpeqError, present
from speq.generator import Generator
from speq.heads.head_shape import HeadShape
from speq.measure.picture import BUDGET, LOWER_IS_FASTER, MOVED, TPOT, Axis, Picture
from speq.measure.report import Column, Report, medians_of
from speq.measure.settings import MaxNewTokens, NumPrompts, Rounds
from speq.options.declared import Nested, Option, Options
from speq.options.kinds import Choice, File, ListOf, Number, Whole
from speq.stats import RunStats
from speq.units import Progress, format_bytes, track

# Those with `tree` draft trees of tree_nodes tokens, and the one with `half` holds half of the
# experts. `auto` is a run as the product chooses it: the plan's drafter, the governor's lengths.
COMPARED_DRAFTERS = (
    *("none", "ngram", "int4", "int4-half", "int4-tree", "cached", "cached-tree"),
    *("head", "head-tree", "head-no-contrast", "auto"),
)


@dataclass(frozen=True, slots=True)
class DraftersSettings(Options):
    """run: what all runs share."""

    budgets: Budgets
    drafters: Annotated[
        tuple[str, ...],
        Option(
            "Which drafters; default: all that the model, its head and the budget allow.",
            ListOf(Choice(COMPARED_DRAFTERS), "names separated by commas", optional=True),
        ),
    ] = ()
    heads: Annotated[
        tuple[Path, ...],
        Option(
            "Heads that `speq train-head` wrote, each compared with the others, such as one "
            "without contrast and one of a single branch; default: the one beside the model.",
            ListOf(File("a folder"), "a folder or several", repeated=True),
        ),
    ] = ()
    temperatures: Annotated[
        tuple[float, ...],
        Option(
            "How freely tokens are drawn; 0 is greedy.",
            ListOf(Number(1e4), "numbers separated by commas, such as 0,1"),
        ),
    ] = (0.0, 1.0)
    draft_length: FixedLength = 4
    tree_nodes: Annotated[int, Option("Tokens of a tree, at most.", Whole(1, MAX_DRAFT_NODES))] = 8
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft_nodes", "drafter", "head", "max_batch"),
                *("draft_experts", "draft_counts", "tpot_slo_ms", "latency_slo_ms"),
                *BUDGET_OPTIONS,
            ),
        ),
    ] = field(default_factory=dict)


TREE, NO_CONTRAST, HALF = "-tree", "-no-contrast", "-half"
NONE, AUTO = "none", "auto"
WARM_UP_TOKENS = 8
MEDIANS = (
    *("tpot_ms", "moved_bytes_per_token", "hit_rate", "route_recall"),
    *("stall_s", "draft_s", "verify_s"),
)


def _shares(values: list[float | None]) -> str:
    return " ".join("-" if each is None else f"{each:.0%}" for each in values) or "-"


COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "T": ("temperature", "{:g}"),
    "drafter": ("drafter", "{}"),
    "holds": ("holds", "{}"),
    "memory": ("draft_bytes", format_bytes),
    "slots": ("slots", "{}"),
    "accept length": ("accept_length", "{:.2f}"),
    "by depth": ("by_depth", _shares),
    "by rank": ("by_rank", _shares),
    "TDI": ("tdi", "{:.2f}"),
    "unique drafted": ("unique_drafted", "{:.0f}"),
    "unique accepted": ("unique_accepted", "{:.0f}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "spread": ("tpot_spread", "{:.0%}"),
    "of none": ("tpot_of_none", "{:.2f}"),
    "of best": ("tpot_of_best", "{:.2f}"),
}
SETTING = (Axis("drafter", "drafter"), Axis("temperature", "temperature"))
LENGTH = Axis("accept_length", "tokens of a step")
PICTURES = (
    Picture("tpot", "Time per output token", (BUDGET,), (TPOT,), SETTING, aid=LOWER_IS_FASTER),
    Picture("moved", "Bytes moved per token", (BUDGET,), (MOVED,), SETTING),
    Picture(
        *("length", "Tokens of a step", (BUDGET,), (LENGTH,), SETTING),
        aid="Higher is better, and at 1 nothing that was drafted stands.",
    ),
    Picture("tdi", "Token diversity", (BUDGET,), (Axis("tdi", "token diversity index"),), SETTING),
)


@dataclass(frozen=True, slots=True)
class ComparedDrafter:
    """A drafter under a budget. head: its folder; None: the one beside the model."""

    budget: str
    name: str
    head: Path | None = None

    @property
    def drafter(self) -> str:
        return self.name.removesuffix(TREE).removesuffix(NO_CONTRAST).removesuffix(HALF)

    @property
    def shown(self) -> str:
        return self.name if self.head is None else f"{self.name} ({self.head})"

    def draft_length(self, settings: DraftersSettings) -> int | None:
        """None: the governor chooses."""
        chosen = {NONE: 0, AUTO: None}
        return chosen.get(self.drafter, settings.draft_length)

    def options(self, settings: DraftersSettings) -> dict[str, Any]:
        """Those of the run."""
        given: dict[str, Any] = {"drafter": self.drafter}
        if self.name.endswith(TREE):
            given["draft_nodes"] = settings.tree_nodes
        if self.name.endswith(HALF):
            given["draft_experts"] = 0.5
        if self.head is not None:
            given["head"] = str(self.head)
        return settings.run | given


@dataclass(slots=True)
class DrafterResult:
    """Of one drafter at one temperature. rounds: of each timed one, of each text."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class DrafterSample:
    """Of one drafter. held: what it takes, and what it is."""

    held: dict[str, Any] = field(default_factory=dict)
    found: dict[float, DrafterResult] = field(default_factory=dict)


@dataclass(slots=True)
class DraftersReport(Report):
    """left_out: drafters that the model or the budget does not allow, and why."""

    left_out: dict[str, str] = field(default_factory=dict)


def notes(report: DraftersReport) -> list[str]:
    return [f"left out: {name}: {reason}" for name, reason in report.left_out.items()]


def run(model: str, settings: DraftersSettings, progress: Progress | None = None) -> DraftersReport:
    """Measure every drafter under every budget and at every temperature.

    Raises SpeqError for nonsense settings, for drafters that were named and cannot be had, and
    where none is left.
    """
    prompts = [text for _, text in texts_of(settings.prompts, settings.num_prompts)]
    cells = [*cells_of(settings)]
    for cell in cells:
        RunConfig.of(cell.budget, cell.draft_length(settings), **cell.options(settings))
    measured: dict[ComparedDrafter, DrafterSample] = {cell: DrafterSample() for cell in cells}
    left_out: dict[ComparedDrafter, str] = {}
    turns = [(turn, cell) for turn in range(settings.rounds) for cell in rotate(cells, turn)]
    for turn, cell in track("comparing drafters", turns, len(turns), progress):
        if cell in left_out:
            continue
        try:
            measure(model, settings, cell, prompts, measured[cell], counted=turn > 0)
        except SpeqError as error:
            if cell.name in settings.drafters or turn:
                raise OptionError(f"{cell.shown}, budget {cell.budget}: {error}") from error
            left_out[cell] = str(error)
    rows = [
        row_of(cell, temperature, measured[cell], settings)
        for cell in cells
        if cell not in left_out
        for temperature in settings.temperatures
    ]
    if not rows:
        raise OptionError(f"no drafter can be had: {next(iter(left_out.values()))}")
    beside_others(rows)
    said = {f"{cell.shown}, {cell.budget}": reason for cell, reason in left_out.items()}
    return DraftersReport("drafters", model, settings.as_json(), rows, left_out=said)


def cells_of(settings: DraftersSettings) -> Iterator[ComparedDrafter]:
    """What is compared, if it can be had: drafters with a head once for each head."""
    for budget, name in product(settings.budgets, settings.drafters or COMPARED_DRAFTERS):
        cell = ComparedDrafter(budget, name)
        if cell.drafter == "head" and settings.heads:
            yield from (replace(cell, head=head) for head in settings.heads)
        else:
            yield cell


def measure(
    model: str,
    settings: DraftersSettings,
    cell: ComparedDrafter,
    prompts: list[str],
    into: DrafterSample,
    counted: bool,
) -> None:
    """One round over the texts, at all temperatures. counted: whether drafts were counted before.

    Raises SpeqError where the drafter cannot be had.
    """
    length, options = cell.draft_length(settings), cell.options(settings)
    generator = Generator.from_pretrained(model, cell.budget, draft_length=length, **options)
    try:
        longest = max(len(generator.encode(prompt)) for prompt in prompts)
        generator.reserve(longest + settings.max_new_tokens)
        into.held = held(generator, cell)
        if cell.name.endswith(NO_CONTRAST):
            without_contrast(generator)
        generator.generate(prompts[-1], max_new_tokens=WARM_UP_TOKENS)
        engine = generator.runtime.engine
        for temperature in settings.temperatures:
            found = into.found.setdefault(temperature, DrafterResult())
            if not counted:
                with counting(engine, found.counts):
                    for _ in written_name(generator, settings, prompts, temperature, found.counts):
                        pass
            runs = written_name(generator, settings, prompts, temperature)
            found.rounds.append([run.summary() for run in runs])
    finally:
        generator.close()


def written_name(
    generator: Generator,
    settings: DraftersSettings,
    prompts: list[str],
    temperature: float,
    counts: DraftCounts | None = None,
) -> Iterator[RunStats]:
    """Generate each text to its full length, drawn by a seed of its own."""
    for seed, prompt in enumerate(prompts):
        if counts is not None:
            counts.begin_sequence()
        generator.generate(
            prompt,
            max_new_tokens=settings.max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
        )
        yield present(generator.last_run, "a text has ended and left no run")


def held(generator: Generator, cell: ComparedDrafter) -> dict[str, Any]:
    """What a drafter takes, and the shape of a head. Raises SpeqError where it was given up."""
    runtime = generator.runtime
    if cell.drafter not in (runtime.residency_plan.drafter, AUTO):
        raise NoRoom(f"{cell.drafter} does not fit the budget; give a larger one")
    items = runtime.plan.items
    drafter = runtime.engine.drafters[0]
    head = drafter if isinstance(drafter, HeadDrafter) else None
    branches = None
    if head is not None:
        branches = head.shape.branches if isinstance(head.shape, HeadShape) else 1
    return {
        "holds": runtime.residency_plan.drafter,
        "draft_bytes": items["draft"] + items.get("head", 0),
        "slots": runtime.plan.slots,
        "branches": branches,
        "contrast": None if head is None else head.says_after,
    }


def without_contrast(generator: Generator) -> None:
    """Have the last token of each path take a pass. Raises SpeqError where it does already."""
    drafter = generator.runtime.engine.drafters[0]
    if not isinstance(drafter, HeadDrafter):
        raise Broken("contrast is to be left out of a run without a head")
    if not drafter.says_after:
        raise OptionError("the head was trained without contrast; head is the same")
    drafter.says_after = False


def row_of(
    cell: ComparedDrafter, temperature: float, measured: DrafterSample, settings: DraftersSettings
) -> dict[str, Any]:
    """Figures of drafts as they were counted, and medians over texts and rounds."""
    found = measured.found[temperature]
    row = {
        "budget": cell.budget,
        "temperature": temperature,
        "drafter": cell.shown,
        "draft_length": cell.draft_length(settings),
        "draft_nodes": settings.tree_nodes if cell.name.endswith(TREE) else None,
        **measured.held,
        **found.counts.row(),
    }
    if cell.name.endswith(NO_CONTRAST):
        row["contrast"] = False
    runs = [run for each in found.rounds for run in each]
    row |= medians_of(runs, MEDIANS)
    of_rounds = [median(run["tpot_ms"] for run in each) for each in found.rounds]
    row["round_tpot_ms"] = of_rounds
    row["tpot_spread"] = (max(of_rounds) - min(of_rounds)) / row["tpot_ms"]
    row["samples"] = len(runs)
    return row


def beside_others(rows: list[dict[str, Any]]) -> None:
    """Add each row's time as a share of that without a draft, where that was measured, and of that
    of the best drafter with a length that was given.
    """
    for row in rows:
        beside = {
            other["drafter"]: other["tpot_ms"]
            for other in rows
            if (other["budget"], other["temperature"]) == (row["budget"], row["temperature"])
        }
        given = [tpot_ms for name, tpot_ms in beside.items() if name != AUTO]
        row["tpot_of_none"] = row["tpot_ms"] / beside[NONE] if NONE in beside else None
        row["tpot_of_best"] = row["tpot_ms"] / min(given) if given else None


if __name__ == "__main__":
    main("drafters")
