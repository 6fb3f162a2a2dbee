"""A verdict: does a model run on a machine, how fast, and what does it take?"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speq.experts.codec import LosslessCodec
from speq.files.published_format import WORDS
from speq.planning.budget_plan import BudgetPlan
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.memory import BudgetTooSmall
from speq.planning.model_spec import ModelSpec
from speq.units import format_bytes, format_forecast

# Tokens of the prompt whose first token is told of.
PROMPT_TOKENS = 500
# Budgets of the table, in GiB.
BUDGETS_GIB = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_ROWS = 7


@dataclass(frozen=True, slots=True)
class Pace:
    """Expected tokens a second. least: no transfer is hidden, at worse speeds than expected; most:
    all are that can be, at better ones
    """

    tokens_per_s: float
    least: float
    most: float

    @classmethod
    def of(cls, plan: ResidencyPlan, ratio: float = 1.0) -> "Pace":
        """ratio: of times that runs here took to those that were planned for them"""
        least_s, most_s = plan.step.range_s
        return cls(*(1 / time_s / ratio for time_s in (plan.tpot_s, most_s, least_s)))

    @property
    def numbers(self) -> list[str]:
        """Expected, least and most, as they are shown."""
        return [format_forecast(each) for each in (self.tokens_per_s, self.least, self.most)]

    def __str__(self) -> str:
        expected, least, most = self.numbers
        return f"{expected} tokens/s ({least} to {most})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Expectations of a model in a budget.

    first_token_s  after a prompt of PROMPT_TOKENS
    model_bytes    of its files; copy_bytes: of the packed copy that a run makes, 0 if none
    free_bytes     of the disk that is to hold both; None: its files are there already
    """

    model: str
    budget_bytes: int
    pace: Pace
    first_token_s: float
    model_bytes: int
    copy_bytes: int
    free_bytes: int | None

    @property
    def lacks_bytes(self) -> int:
        """Bytes of disk that are missing for the model's files; 0 where there are enough."""
        return 0 if self.free_bytes is None else max(self.model_bytes - self.free_bytes, 0)

    @property
    def sentence(self) -> str:
        soon = time_of(self.first_token_s)
        first = f"the first token of a prompt of {PROMPT_TOKENS} after about {soon}"
        speed = f"about {self.pace} within {format_bytes(self.budget_bytes)} of memory, {first}"
        disk = f"its files take about {format_bytes(self.model_bytes)} of disk"
        if self.copy_bytes:
            disk += f", and a compressed copy of its experts {format_bytes(self.copy_bytes)} more"
        if self.free_bytes is None:
            return f"{self.model} runs here: {speed}; {disk}."
        disk += f"; {format_bytes(self.free_bytes)} are free"
        if self.lacks_bytes:
            return (
                f"{self.model} does not fit this disk: {disk}. With "
                f"{format_bytes(self.lacks_bytes)} more it would run: {speed}."
            )
        return f"{self.model} would run here: {speed}; {disk}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "tokens_per_s": self.pace.tokens_per_s,
            "tokens_per_s_least": self.pace.least,
            "tokens_per_s_most": self.pace.most,
            "first_token_s": self.first_token_s,
            "model_bytes": self.model_bytes,
            "copy_bytes": self.copy_bytes,
            "free_disk_bytes": self.free_bytes,
        }


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A line of the table over budgets.

    cached   share of the experts in slots
    instead  tokens a second with what `PlannedModel.instead` names
    """

    budget_bytes: int
    cached: float
    pace: Pace
    instead: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget_bytes,
            "cached": self.cached,
            "instead": self.instead,
            "tokens_per_s": self.pace.tokens_per_s,
            "tokens_per_s_least": self.pace.least,
            "tokens_per_s_most": self.pace.most,
        }


def verdict_of(
    made: BudgetPlan, flops_per_s: float | None, folder: Path | None, ratio: float = 1.0
) -> Verdict:
    """flops_per_s: of products; None: not known, and prompts are told by what they read.

    folder  where the model's files would lie; None: they are there
    ratio   see `Pace.of`
    """
    spec, best = made.model_spec, made.candidates[made.best]
    experts = spec.shape.experts
    missing = max(spec.count - held(spec, best), 0)
    loaded_s = missing * best.moved_bytes / made.assumptions.link.bandwidth_bytes_per_s
    of_expert = experts.weights
    active = spec.shape.resident_weights + spec.num_layers * spec.shape.top_k * of_expert
    computed_s = 0.0 if flops_per_s is None else 2 * active * PROMPT_TOKENS / flops_per_s
    return Verdict(
        spec.name,
        made.budget.budget_bytes,
        Pace.of(best, ratio),
        max(loaded_s, computed_s) + best.tpot_s,
        files_bytes(spec),
        copy_bytes(spec, best) if made.budget.on_cpu else 0,
        None if folder is None else free_bytes(folder),
    )


def does_not_run(spec: ModelSpec, error: BudgetTooSmall, folder: Path | None) -> BudgetTooSmall:
    """The verdict where memory does not do. folder: as of `verdict_of`"""
    disk = f"its files take about {format_bytes(files_bytes(spec))} of disk"
    if folder is not None:
        disk += f"; {format_bytes(free_bytes(folder))} are free"
    sentence = f"{spec.name} does not run in this memory: {error}; {disk}"
    return BudgetTooSmall(sentence, error.needed_bytes)


def held(spec: ModelSpec, plan: ResidencyPlan) -> int:
    """Experts in slots of all GPUs."""
    return plan.slots + spec.num_layers * sum(plan.peers)


def files_bytes(spec: ModelSpec) -> int:
    """About what the model's files take: its experts as published, and all other weights."""
    return spec.count * spec.published_bytes + spec.shape.resident_weights * spec.words.itemsize


def copy_bytes(spec: ModelSpec, best: ResidencyPlan) -> int:
    """About what a packed copy of the experts takes, where a run makes one."""
    shape, usual = spec.codec.shape, LosslessCodec.usual_bits
    if shape.published != WORDS or best.slots >= spec.count or usual is None:
        return 0
    return round(spec.count * shape.nbytes * usual / 8 / spec.words.itemsize)


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, or of the first above it that there is."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


def budgets_for(made: BudgetPlan, memory_bytes: int) -> list[int]:
    """Budgets of the table: up to where all experts lie in slots, or to this machine's memory."""
    whole = sum(made.memory[made.best].items.values())
    whole += max(made.model_spec.count - made.candidates[made.best].slots, 0) * (
        made.candidates[made.best].slot_bytes
    )
    sizes = [size << 30 for size in BUDGETS_GIB]
    most = next((size for size in sizes if size >= whole), sizes[-1])
    kept = [size for size in sizes if size <= min(most, max(memory_bytes, sizes[0]))]
    return kept[-MOST_ROWS:]


def plans_in(plan: Callable[[int], BudgetPlan], budgets: Sequence[int]) -> Iterator[BudgetPlan]:
    """Plans for budgets, but for those that are too small."""
    for budget_bytes in budgets:
        with suppress(BudgetTooSmall):
            yield plan(budget_bytes)


def rows_of(
    plans: Iterable[BudgetPlan],
    instead: Mapping[str, Callable[[int], BudgetPlan]] | None = None,
    ratio_of: Callable[[BudgetPlan], float] = lambda made: 1.0,
) -> Iterator[BudgetRow]:
    """Lines of the table over budgets.

    instead   plans of what may run faster
    ratio_of  of a plan, see `Pace.of`
    """
    for made in plans:
        best, budget_bytes = made.candidates[made.best], made.budget.budget_bytes
        share = min(held(made.model_spec, best) / made.model_spec.count, 1.0)
        ratio = ratio_of(made)
        others = {
            name: 1 / other.candidates[other.best].tpot_s / ratio
            for name, plan in (instead or {}).items()
            for other in plans_in(plan, [budget_bytes])
        }
        yield BudgetRow(budget_bytes, share, Pace.of(best, ratio), others)


def time_of(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
