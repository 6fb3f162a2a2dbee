"""The scheduler on a model larger than memory: time and bytes per token, beside their floors.

At a share f of the experts' memory, above what everything else takes, the same draft length runs
with all experts in memory, with fetching on demand and LRU eviction, and with the draft's routes
prefetched and eviction by the next use. The floor is the longer of the time with everything in
memory and of the link's time for the useful bytes: those loaded and used before they were evicted.
Systems are rotated within a round, and the link is measured in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.neighbours import disturbed
from speq.bench.rotation import rotated
from speq.bench.settings import ScheduleSettings as Settings
from speq.experts.expert_store import mean_moved_bytes
from speq.files.atomic_file import check_target
from speq.files.checkpoint import locate
from speq.generator import Generator
from speq.measure.link import link_bytes_per_s
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.models.opened import open_model
from speq.stats import RunStats, ratio
from speq.text.tokenizer import load_tokenizer, tokens_of
from speq.units import Progress, format_bytes, track

# Name in the table: eviction, prefetching.
SYSTEMS = {
    "resident": ("lookahead", "none"),
    "lru": ("lru", "none"),
    "lookahead": ("lookahead", "none"),
    "three-phase": ("lookahead", "three-phase"),
}
WARM_UP_TOKENS = 16
# Share of the experts' memory that holds all of them, and the draft.
ALL = 2.0

COLUMNS: dict[str, Column] = {
    "f": ("fraction", "{}"),
    "system": ("system", "{}"),
    "slots": ("slots", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "floor ms": ("floor_ms", "{:.1f}"),
    "of floor": ("of_floor", "{:.2f}"),
    "of LRU": ("of_lru", "{:.2f}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "of LRU's": ("moved_of_lru", "{:.2f}"),
    "stall": ("stall_share", "{:.1%}"),
    "hidden": ("hidden_share", "{:.1%}"),
    "in time": ("hit_rate", "{:.1%}"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's texts in one round. Bytes are per token; link_s: the link's time for one.

    useful_bytes  without experts that were evicted before they were used
    hit_rates     of each text
    """

    slots: int
    link_s: float
    tpot_ms: float
    moved_bytes: float
    useful_bytes: float
    stall_share: float
    hidden_share: float
    hit_rates: tuple[float, ...]
    acceptance_rate: float | None

    @classmethod
    def of(
        cls, slots: int, expert_bytes: float, link_s: float, runs: Sequence[RunStats]
    ) -> "Sample":
        """From runs that decoded at least one step, all together."""

        def total(name: str) -> float:
            return float(sum(run.total(name) for run in runs))

        tokens, decode_s, moved_bytes = total("emitted"), total("duration_s"), total("moved_bytes")
        hidden_share = ratio(total("link_s") - total("exposed_s"), total("link_s"))
        return cls(
            slots=slots,
            link_s=link_s,
            tpot_ms=decode_s / tokens * 1e3,
            moved_bytes=moved_bytes / tokens,
            useful_bytes=(moved_bytes - total("wasted") * expert_bytes) / tokens,
            stall_share=total("stall_s") / decode_s,
            hidden_share=1.0 if hidden_share is None else hidden_share,
            hit_rates=tuple(run.total("hits") / run.total("requests") for run in runs),
            acceptance_rate=ratio(total("accepted"), total("draft_length")),
        )

    @property
    def useful_ms(self) -> float:
        return self.useful_bytes * self.link_s * 1e3


@disturbed
def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Measure all systems at all shares. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    fractions = settings.fractions
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    tokenizer = load_tokenizer(locate(model))
    longest = max(len(tokens_of(tokenizer, prompt)) for prompt in prompts)
    context = longest + settings.max_new_tokens
    cells = [(ALL, "resident")] + [(f, s) for f in fractions for s in SYSTEMS if s != "resident"]
    samples: dict[tuple[float, str], list[Sample]] = {cell: [] for cell in cells}
    turns = [cell for turn in range(settings.rounds) for cell in rotated(cells, turn)]
    for cell in track("measuring systems", turns, len(turns), progress):
        samples[cell].append(measure(model, settings, *cell, prompts, context))
    rows = []
    for fraction, system in cells:
        lru = samples[fraction, "lru"] if system != "resident" else samples[ALL, "resident"]
        rows.append(
            summarise(fraction, system, samples[fraction, system], samples[ALL, "resident"], lru)
        )
    given = settings.as_json()
    report = Report("schedule", model, given, rows)
    if json_file is not None:
        report.write(json_file)
    return report


def budget_for(model: str, fraction: float, context: int) -> int:
    """Bytes for the weights outside the experts, the KV cache and so much of the experts' plain
    words: slots, the draft and what a pass needs come out of that share.
    """
    opened = open_model(model)
    try:
        shape, store = opened.shape, opened.store
        dtype = store.codec.shape.dtype
        kv_bytes = context * shape.kv_elements_per_token * dtype.itemsize
        experts = store.num_layers * store.num_experts * store.codec.shape.nbytes
        return shape.resident_bytes(dtype) + kv_bytes + int(fraction * experts)
    finally:
        opened.close()


def measure(
    model: str,
    settings: Settings,
    fraction: float,
    system: str,
    prompts: list[str],
    context: int,
) -> Sample:
    """All prompts, the slots warm from one before that does not count."""
    policy, prefetch = SYSTEMS[system]
    generator = Generator.from_pretrained(
        model,
        budget_for(model, fraction, context),
        context_length=context,
        draft_length=settings.draft_length,
        profile="none",
        cache_policy=policy,
        prefetch=prefetch,
        reader_threads=settings.reader_threads,
        device="cpu",
    )
    try:
        runs = runs_of(generator, prompts, settings.max_new_tokens, WARM_UP_TOKENS)
        store = generator.runtime.opened.store
        link_s = 1 / link_bytes_per_s(store, settings.reader_threads)
        return Sample.of(generator.runtime.plan.slots, mean_moved_bytes(store), link_s, runs)
    finally:
        generator.close()


def summarise(
    fraction: float, system: str, samples: list[Sample], resident: list[Sample], lru: list[Sample]
) -> dict[str, Any]:
    """One row: medians over rounds; ratios are taken within a round."""
    resident_ms = median(sample.tpot_ms for sample in resident)
    floors = [max(resident_ms, sample.useful_ms) for sample in samples]
    of_lru = median(s.tpot_ms / other.tpot_ms for s, other in zip(samples, lru, strict=True))
    moved = median(sample.moved_bytes for sample in samples)
    return {
        "fraction": fraction,
        "system": system,
        "slots": samples[0].slots,
        "tpot_ms": median(sample.tpot_ms for sample in samples),
        "floor_ms": median(floors),
        "of_floor": median(s.tpot_ms / floor for s, floor in zip(samples, floors, strict=True)),
        "of_lru": of_lru,
        "moved_bytes_per_token": moved,
        "moved_of_lru": ratio(moved, median(sample.moved_bytes for sample in lru)),
        "useful_bytes_per_token": median(sample.useful_bytes for sample in samples),
        "link_bytes_per_s": median(1 / sample.link_s for sample in samples),
        "stall_share": median(sample.stall_share for sample in samples),
        "hidden_share": median(sample.hidden_share for sample in samples),
        "hit_rate": median(rate for sample in samples for rate in sample.hit_rates),
        "acceptance_rate": samples[0].acceptance_rate,
        "samples": len(samples),
    }
