"""Time to first token of a long prompt, beside the floor that the machine sets.

A prompt cannot be read faster than the experts it needs come over the link, each of them once, nor
faster than it is computed with all of them in memory. The floor is the larger of the two, both
measured in the same run; every round loads the model anew, so that no expert is there yet.
"""

from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

from bench.lab.command import main
from speq.bench.machine.page_cache import drop
from speq.bench.neighbours import beside_neighbours
from speq.bench.settings import Budgets, Neighbours
from speq.config import DEFAULT_READER_THREADS, Dtype, ReaderThreads
from speq.errors import SpeqError
from speq.experts.expert_store import mean_moved_bytes
from speq.generator import Generator
from speq.machine import available_bytes
from speq.measure.link import link_bytes_per_s
from speq.measure.picture import BUDGET, Axis, Picture, gibibytes
from speq.measure.report import Column, Report, read_prompts
from speq.measure.settings import Prompts, Rounds
from speq.options.declared import Option, Options
from speq.options.kinds import Whole
from speq.runtime import Runtime
from speq.units import Progress, format_bytes, track


@dataclass(frozen=True, slots=True)
class PrefillSettings(Options):
    budgets: Budgets
    prompt_tokens: Annotated[int, Option("Length of the prompt.", Whole(1))] = 1000
    prompts: Prompts = None
    rounds: Rounds = 3
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS
    neighbours: Neighbours = 0


COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "tokens": ("prompt_tokens", "{}"),
    "chunk": ("chunk", "{}"),
    "slots": ("slots_bytes", format_bytes),
    "TTFT s": ("ttft_s", "{:.2f}"),
    "link s": ("link_s", "{:.2f}"),
    "in memory s": ("resident_s", "{:.2f}"),
    "of floor": ("floor_ratio", "{:.2f}"),
    "moved": ("moved_bytes", format_bytes),
    "distinct": ("distinct_bytes", format_bytes),
    "stall s": ("stall_s", "{:.2f}"),
}
TIMES = (
    Axis("ttft_s", "time to first token, s"),
    Axis("link_s", "the link for the same bytes, s"),
    Axis("resident_s", "with all experts in memory, s"),
)
BYTES = (gibibytes("moved_bytes", "moved"), gibibytes("distinct_bytes", "of the experts it uses"))
PICTURES = (
    Picture(
        *("ttft", "Time of a long prompt", (BUDGET,), TIMES),
        aid="No run can be faster than the longer of its two other bars.",
    ),
    Picture("moved", "Bytes that a prompt moves", (BUDGET,), BYTES),
)
# Of the memory there is, for the run with every expert in it.
RESIDENT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One cold prompt. resident_s is None where memory does not hold every expert."""

    ttft_s: float
    link_s: float
    resident_s: float | None
    stats: dict[str, Any]
    distinct_bytes: int
    chunk: int

    @property
    def floor_s(self) -> float:
        return max(self.link_s, self.resident_s or 0.0)


@beside_neighbours
def run(model: str, settings: PrefillSettings, progress: Progress | None = None) -> Report:
    """Measure every budget. Raises SpeqError for nonsense settings."""
    samples: dict[str, list[PrefillSample]] = {budget: [] for budget in settings.budgets}
    resident = resident_generator(model, settings)
    try:
        turns = settings.budgets * settings.rounds
        for budget in track("running prompts", turns, len(turns), progress):
            samples[budget].append(measure(model, settings, budget, resident))
    finally:
        if resident is not None:
            resident.close()
    rows = [summarise(budget, settings, samples[budget]) for budget in settings.budgets]
    given = settings.as_json()
    return Report("prefill", model, given, rows)


def load(model: str, settings: PrefillSettings, budget: str | int) -> Generator:
    """A generator with memory laid out for the prompt."""
    generator = Generator.from_pretrained(
        model,
        budget,
        draft_length=0,
        profile="none",
        device="cpu",
        dtype=settings.dtype,
        reader_threads=settings.reader_threads,
    )
    try:
        generator.reserve(settings.prompt_tokens + 1)
    except BaseException:
        generator.close()
        raise
    return generator


def resident_generator(model: str, settings: PrefillSettings) -> Generator | None:
    """One whose every expert is in memory, or None where the machine has too little."""
    try:
        generator = load(model, settings, int(available_bytes() * RESIDENT_SHARE))
    except SpeqError:
        return None
    runtime = generator.runtime
    if runtime.plan.slots < runtime.opened.store.num_layers * runtime.opened.store.num_experts:
        generator.close()
        return None
    first_token(generator, prompt_of(generator, settings))  # brings them there
    return generator


def prompt_of(generator: Generator, settings: PrefillSettings) -> list[int]:
    """So many tokens of the prompts, one behind the other, again and again if need be."""
    text = "\n\n".join(read_prompts(settings.prompts, 1 if settings.prompts else 16))
    ids: list[int] = []
    while len(ids) < settings.prompt_tokens:
        ids += generator.encode(text)
    return ids[: settings.prompt_tokens]


def first_token(generator: Generator, prompt: list[int]) -> dict[str, Any]:
    generator.forget()  # it is the same prompt each time
    return generator.generate(prompt, max_new_tokens=1, ignore_eos=True).stats


def measure(
    model: str, settings: PrefillSettings, budget: str, resident: Generator | None
) -> PrefillSample:
    """The first prompt of a newly loaded model, then the link, then the same with all in memory."""
    generator = load(model, settings, budget)
    try:
        prompt = prompt_of(generator, settings)
        runtime = generator.runtime
        for path in runtime.opened.store.source.files:
            drop(path)
        stats = first_token(generator, prompt)
        distinct = distinct_bytes(runtime)
        link = link_bytes_per_s(runtime.opened.store, settings.reader_threads)
        chunk = runtime.plan.chunk
    finally:
        generator.close()
    return PrefillSample(
        ttft_s=stats["ttft_ms"] / 1e3,
        link_s=distinct / link,
        resident_s=first_token(resident, prompt)["ttft_ms"] / 1e3 if resident else None,
        stats=stats,
        distinct_bytes=distinct,
        chunk=chunk,
    )


def distinct_bytes(runtime: Runtime) -> int:
    """Bytes of the experts that the one prompt run so far wanted, each counted once."""
    return round(
        runtime.engine.offload.stream.history.chosen * mean_moved_bytes(runtime.opened.store)
    )


def summarise(
    budget: str, settings: PrefillSettings, samples: list[PrefillSample]
) -> dict[str, Any]:
    """One row: medians, and the median of each round's own ratio."""
    resident = [s.resident_s for s in samples if s.resident_s is not None]
    return {
        "budget": budget,
        "prompt_tokens": settings.prompt_tokens,
        "chunk": samples[0].chunk,
        "slots_bytes": samples[0].stats["memory"]["slots"],
        "ttft_s": median(s.ttft_s for s in samples),
        "link_s": median(s.link_s for s in samples),
        "resident_s": median(resident) if resident else None,
        "floor_ratio": median(s.ttft_s / s.floor_s for s in samples),
        "moved_bytes": median(s.stats["prefill_moved_bytes"] for s in samples),
        "read_bytes": median(s.stats["prefill_read_bytes"] for s in samples),
        "distinct_bytes": samples[0].distinct_bytes,
        "stall_s": median(s.stats["prefill_stall_s"] for s in samples),
        "samples": len(samples),
    }


if __name__ == "__main__":
    main("prefill")
