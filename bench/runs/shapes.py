"""A model of random weights in a published model's shapes: its times beside the machine's floors.

Every figure is of one run on one machine: rates are measured first, floors are computed from them
and from shapes, and then the model runs, a budget after another. Texts are sampled at temperature
1, since a random model repeats itself else, and nothing drafts: a random draft has no acceptance.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from speq.bench.rivals.worker import peak_rss_bytes
from speq.bench.settings import ShapesSettings as Settings
from speq.bench.shapes.floor import Floor, MachineRates, floor_of
from speq.bench.shapes.published import PublishedShape, shape_of
from speq.bench.shapes.random_checkpoint import checkpoint
from speq.bench.shapes.routes import PUBLISHED_HITS, lru_hits, routes_of
from speq.errors import OptionError
from speq.generator import Generator
from speq.measure.picture import BUDGET, HITS, MOVED, TPOT, TTFT, Axis, Picture
from speq.measure.plan import measure_machine, plan
from speq.measure.report import Column, Report
from speq.models.opened import open_model
from speq.models.shape import ModelShape
from speq.planning.cost.presets import MEMORY_SHARE
from speq.units import Progress, format_bytes, parse_bytes, track

FIRST_PROMPT_TOKENS = 14
MATRIX, PRODUCTS = 2048, 5

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "context": ("context", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "of floor": ("tpot_ratio", "{:.2f}"),
    "forecast": ("forecast_ratio", "{:.2f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "of its floor": ("ttft_ratio", "{:.2f}"),
    "prompt tokens/s": ("prefill_tokens_per_s", "{:.0f}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "of its least": ("moved_ratio", "{:.2f}"),
    "load s": ("load_s", "{:.1f}"),
    "first s": ("first_token_s", "{:.1f}"),
    "again s": ("again_s", "{:.1f}"),
    "peak": ("peak_bytes", format_bytes),
}
CONTEXT = Axis("context", "tokens of context")
FLOOR = Axis("floor_ms", "the machine's floor, ms")
PICTURES = (
    Picture(
        *("tpot", "Time per output token", (CONTEXT, BUDGET), (TPOT, FLOOR)),
        aid="No run can be faster than its floor.",
    ),
    Picture("ttft", "Time to first token", (CONTEXT, BUDGET), (TTFT,), aid="Lower is sooner."),
    Picture("moved", "Bytes moved per token", (CONTEXT, BUDGET), (MOVED,), aid="Lower is less."),
    Picture("hit-rate", "Experts that lay in slots when needed", (CONTEXT, BUDGET), (HITS,)),
)


def run(shape: str, settings: Settings, progress: Progress | None = None) -> Report:
    """Write the checkpoint, unless it is there, and measure. Raises SpeqError for nonsense."""
    published = shape_of(shape, settings.layers)
    folder = settings.folder
    checkpoint(published, folder, settings.seed, progress)
    opened = open_model(folder)
    try:
        model_shape = opened.shape
        longest = max(settings.contexts) + settings.max_new_tokens
        if longest > model_shape.max_context:
            raise OptionError(
                f"contexts go up to {max(settings.contexts)} and the model's context is "
                f"{model_shape.max_context}, of which max_new_tokens takes "
                f"{settings.max_new_tokens}; give shorter ones"
            )
        measured = measure_machine(opened, progress)
    finally:
        opened.close()
    rates = MachineRates(
        measured.memory_bytes_per_s / MEMORY_SHARE, measured.link_bytes_per_s, flops()
    )
    rows = []
    for budget in settings.budgets:
        rows += measure(folder, model_shape, budget, settings, rates, progress)
    return Report("shapes", published.name, settings.as_json() | described(published, rates), rows)


def described(shape: PublishedShape, rates: MachineRates) -> dict[str, Any]:
    return {"source": shape.source, "rates": asdict(rates)}


def flops() -> float:
    """Rate of the product of two large bfloat16 matrices: the best of some."""
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16)
    times = []
    for _ in range(PRODUCTS):
        start_s = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start_s)
    return 2 * MATRIX**3 / min(times)


def measure(
    folder: Path,
    shape: ModelShape,
    budget: str,
    settings: Settings,
    rates: MachineRates,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """A row for each context. Every round loads the model anew."""
    budget_bytes = parse_bytes(budget)
    floors = {each: floor_of(shape, budget_bytes, each, rates) for each in settings.contexts}
    planned = plan(folder, budget_bytes, context_length=max(settings.contexts), profile="none")
    forecast_ms = min(each.tpot_s for each in planned.candidates if not each.drafts) * 1e3
    starts: list[tuple[float, float]] = []
    samples: dict[int, list[dict[str, Any]]] = {each: [] for each in settings.contexts}
    for round_ in track(f"measuring {budget}", range(settings.rounds), settings.rounds, progress):
        reset_peak()
        loaded = time.perf_counter()
        generator = Generator.from_pretrained(
            folder, budget, draft_length=0, draft="none", profile="none", device="cpu"
        )
        try:
            load_s = time.perf_counter() - loaded
            first = generate(generator, FIRST_PROMPT_TOKENS, 1, settings, round_)
            starts.append((load_s, load_s + first["ttft_ms"] / 1e3))
            generator.reserve(max(settings.contexts) + settings.max_new_tokens)
            for context in settings.contexts:
                stats = generate(generator, context, settings.max_new_tokens, settings, round_)
                samples[context].append(stats | {"peak_bytes": peak_rss_bytes()})
        finally:
            generator.close()
    beside = {
        "load_s": median(load_s for load_s, _ in starts),
        "first_token_s": starts[0][1],
        "again_s": starts[1][1] if len(starts) > 1 else None,
    }
    return [
        {"budget": budget, "budget_bytes": budget_bytes}
        | summarise(context, samples[context], floors[context], forecast_ms)
        | beside
        for context in settings.contexts
    ]


def generate(
    generator: Generator, prompt_tokens: int, max_new_tokens: int, settings: Settings, round_: int
) -> dict[str, Any]:
    """The stats of a text behind random tokens."""
    draws = torch.Generator().manual_seed(settings.seed + 1000 * round_ + prompt_tokens)
    vocabulary = generator.runtime.opened.shape.vocab_size
    prompt = torch.randint(vocabulary, (prompt_tokens,), generator=draws).tolist()
    generator.forget()
    return generator.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=settings.seed + round_,
        ignore_eos=True,
    ).stats


def summarise(
    context: int, samples: Sequence[dict[str, Any]], floor: Floor, forecast_ms: float
) -> dict[str, Any]:
    """One row: medians, and each beside its floor."""
    names = ("tpot_ms", "ttft_ms", "hit_rate", "moved_bytes_per_token", "prefill_moved_bytes")
    row: dict[str, Any] = {name: median(sample[name] for sample in samples) for name in names}
    tpot_ms, ttft_ms = row["tpot_ms"], row["ttft_ms"]
    return row | {
        "context": context,
        "floor_ms": floor.token_s * 1e3,
        "tpot_ratio": tpot_ms / floor.token_s / 1e3,
        "forecast_ratio": tpot_ms / forecast_ms,
        "ttft_ratio": ttft_ms / floor.prompt_s / 1e3,
        "prefill_tokens_per_s": context / ttft_ms * 1e3,
        "moved_ratio": row["moved_bytes_per_token"] / floor.moved_bytes
        if floor.moved_bytes
        else None,
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "samples": len(samples),
    }


def reset_peak() -> None:
    """Have the system measure the peak memory of the process anew, where it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def notes(report: Report) -> list[str]:
    """How its routes fare in caches, beside what a paper published."""
    routes = routes_of(128, 8)
    made = ", ".join(
        f"{lru_hits(routes, round(128 * share)):.0%} ({hits:.0%} published)"
        for share, hits in PUBLISHED_HITS.items()
    )
    held = ", ".join(f"{share:.0%}" for share in PUBLISHED_HITS)
    rates = report.settings["rates"]
    return [
        f"random weights; shapes: {report.settings['source']}",
        f"LRU with {held} of 128 experts resident hits {made}: DeepSeek-V2-Lite, MoE-SpeQ, Table 3",
        f"measured: memory {format_bytes(rates['memory_bytes_per_s'])}/s, link "
        f"{format_bytes(rates['link_bytes_per_s'])}/s, {rates['flops_per_s'] / 1e9:.0f} Gflop/s",
    ]
