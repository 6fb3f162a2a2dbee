"""Times on random weights in a published model's shapes, beside what they take at least.

A model is written once and kept. Text is sampled at temperature 1, since random weights choose no
token for certain; drafts are off, since nothing drafts random text.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.machine.page_cache import drop
from speq.bench.rivals.worker import peak_rss_bytes
from speq.bench.settings import ShapesSettings as Settings
from speq.bench.shapes.checkpoint import ShapedModel, write
from speq.bench.shapes.floor import MeasuredRates, floor_of
from speq.bench.shapes.llama_cpp import llama_cpp_rows
from speq.bench.shapes.prompts import random_tokens
from speq.bench.shapes.published import shape_named
from speq.bench.shapes.routes import CURVE, SOURCE, Routes, lru_hits, most_used_hits
from speq.errors import OptionError, present
from speq.files.cache_folder import cache_folder
from speq.files.heap import give_back
from speq.generator import Generator
from speq.measure.picture import BUDGET, HITS, MOVED, Axis, Picture
from speq.measure.plan import plan_of
from speq.measure.report import Column, Report
from speq.measure.settings import PlanSettings
from speq.models.opened import open_model
from speq.planning.forecasts import SteadyTime
from speq.stats import ratio
from speq.units import Progress, format_bytes, parse_bytes, track

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "context": ("context", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "spread": ("tpot_spread", "{:.0%}"),
    "floor": ("tpot_floor_ms", "{:.1f}"),
    "of floor": ("tpot_ratio", "{:.2f}"),
    "steady ms": ("steady_ms", "{:.1f}"),
    "plan ms": ("forecast_ms", "{:.1f}"),
    "plan err": ("forecast_error", "{:+.0%}"),
    "TTFT s": ("ttft_s", "{:.2f}"),
    "TTFT floor": ("ttft_floor_s", "{:.2f}"),
    "TTFT of floor": ("ttft_ratio", "{:.2f}"),
    "prefill/s": ("prefill_tokens_per_s", "{:.0f}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "moved of floor": ("moved_ratio", "{:.2f}"),
    "load s": ("load_s", "{:.1f}"),
    "1st run s": ("first_run_s", "{:.1f}"),
    "2nd run s": ("second_run_s", "{:.1f}"),
    "peak": ("peak_bytes", format_bytes),
    "of budget": ("peak_ratio", "{:.2f}"),
}
CURVE_COLUMNS: dict[str, Column] = {
    "experts held": ("share", "{:.0%}"),
    "published": ("published", "{:.0%}"),
    "most used": ("most_used", "{:.1%}"),
    "least recently used": ("lru", "{:.1%}"),
}
BESIDE_COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "context": ("context", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "of speq's": ("tpot_ratio", "{:.2f}"),
    "TTFT s": ("ttft_s", "{:.2f}"),
    "of speq's TTFT": ("ttft_ratio", "{:.2f}"),
}
FURTHER_TABLES = (
    (f"hits by experts held ({SOURCE})", "curve", CURVE_COLUMNS),
    ("llama.cpp on the same weights", "beside", BESIDE_COLUMNS),
)
CONTEXT = (Axis("context", "tokens of context"),)
TPOTS = (Axis("tpot_ms", "measured, ms"), Axis("tpot_floor_ms", "floor, ms"))
TTFTS = (Axis("ttft_s", "measured, s"), Axis("ttft_floor_s", "floor, s"))
PICTURES = (
    Picture("tpot", "Time per output token", (BUDGET, *CONTEXT), TPOTS, aid="Lower is faster."),
    Picture("ttft", "Time to first token", (BUDGET, *CONTEXT), TTFTS, aid="Lower is sooner."),
    Picture("moved", "Bytes moved per token", (BUDGET,), (MOVED,), CONTEXT),
    Picture("hit-rate", "Experts that lay in slots when needed", (BUDGET,), (HITS,), CONTEXT),
)
# Tokens whose routes are looked at.
ROUTED_TOKENS = 96
SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


@dataclass(slots=True)
class ShapesReport(Report):
    """curve: of the routes of the run; beside: llama.cpp's rows; made: what was written, and the
    machine's rates.
    """

    curve: list[dict[str, Any]] = field(default_factory=list)
    beside: list[dict[str, Any]] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)


def run(
    shapes: str, settings: Settings, progress: Progress | None = None, quiet: bool = False
) -> Report:
    """Write the model unless it is there, and measure every budget with every context.

    Raises SpeqError for nonsense settings, and for what does not fit.
    """
    model = ShapedModel.of(shape_named(shapes), settings.layers, settings.weights, settings.seed)
    longest = max(settings.contexts) + settings.max_new_tokens
    if longest > model.model_spec.shape.max_context:
        raise OptionError(
            f"contexts and max_new_tokens ask for {longest} tokens and {model.name} has "
            f"{model.model_spec.shape.max_context}; give less"
        )
    kept = cache_folder("shapes") or Path("shapes")
    folder = settings.folder or kept / model.name
    if not quiet:
        needed = f"{model.name} takes {format_bytes(model.nbytes)} of disk in {folder}"
        print(f"{needed}; its shapes: {model.shape.source}", file=sys.stderr, flush=True)
    write(model, folder, progress=progress)
    with closing(open_model(folder)) as opened:
        rates = MeasuredRates.of(opened)
    made = {
        **{"source": model.shape.source, "weights": model.kind, "path": str(folder)},
        **{"parameters": model.parameters, "bytes": model.nbytes, "drafts": "off"},
        **asdict(rates),
    }
    report = ShapesReport("shapes", model.name, settings.as_json(), [], made=made)
    for budget in track("measuring budgets", settings.budgets, len(settings.budgets), progress):
        bounds = [bounds_of(model, folder, rates, settings, budget, c) for c in settings.contexts]
        measured, layers = measure(folder, settings, budget)
        rows = [summarise(bound, found) for bound, found in zip(bounds, measured, strict=True)]
        report.rows += rows
        if settings.llama_cpp:
            report.beside += llama_cpp_rows(
                folder, settings, rows, model.model_spec.shape.vocab_size
            )
        report.curve = report.curve or curve_of(layers, model.model_spec.shape.experts.num_experts)
    return report


def bounds_of(
    model: ShapedModel,
    folder: Path,
    rates: MeasuredRates,
    settings: Settings,
    budget: str,
    context: int,
) -> dict[str, Any]:
    """Say before the run what it takes at least, and what `plan` expects of it."""
    floor = floor_of(model, rates, parse_bytes(budget), context)
    length = context + settings.max_new_tokens
    planned = plan_of(folder, PlanSettings(parse_bytes(budget), context_length=length))
    return {
        "budget": budget,
        "budget_bytes": parse_bytes(budget),
        "context": context,
        "forecasts": {
            (each.codec, each.encoded, each.copied_share): each.tpot_s
            * planned.correction_of(each)
            * 1e3
            for each in planned.candidates
            if not each.drafts
        },
        "tpot_floor_ms": floor.tpot_s * 1e3,
        "ttft_floor_s": floor.ttft_s,
        "floor_read_bytes": floor.read_bytes,
        "floor_moved_bytes": floor.moved_bytes,
    }


def measure(
    folder: Path, settings: Settings, budget: str
) -> tuple[list[dict[str, Any]], list[Routes]]:
    """Figures of each context, and the routes of the layers.

    The first run reads from disk alone; the second one finds what the first has left.
    """
    for path in folder.glob("*.safetensors"):
        drop(path)
    generator, load_s, first_run_s = start(folder, settings, budget)
    generator.close()
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # forget the most memory that there was
    before = peak_rss_bytes()
    generator, _, second_run_s = start(folder, settings, budget)
    starts = {"load_s": load_s, "first_run_s": first_run_s, "second_run_s": second_run_s}
    found = []
    with closing(generator):
        for context in settings.contexts:
            samples = []
            for seed in range(settings.seed, settings.seed + settings.rounds):
                prompt = prompt_of(generator, context, seed)
                made = generator.generate(
                    prompt, max_new_tokens=settings.max_new_tokens, seed=seed, **SAMPLED
                )
                steady = SteadyTime()
                steady.add(present(generator.last_run, "a run has no record"))
                steady_s = present(ratio(steady.seconds, steady.tokens), "a run has no steps")
                samples.append(made.stats | {"steady_ms": steady_s * 1e3})
            peak, held = peak_rss_bytes() - before, generator.runtime.residency_plan
            way = held.codec, held.encoded, held.copied_share
            found.append({"samples": samples, "way": way, "peak_bytes": peak, **starts})
        layers = routes_of(generator, settings.seed)
    return found, layers


def start(folder: Path, settings: Settings, budget: str) -> tuple[Generator, float, float]:
    """Load the model and have it say a token: when it was loaded, and when it was said, in s."""
    context = max(settings.contexts) + max(settings.max_new_tokens, ROUTED_TOKENS)
    options: dict[str, Any] = {"context_length": context, **settings.run}
    began_s = time.perf_counter()
    generator = Generator.from_pretrained(folder, budget, draft_length="0", **options)
    load_s = time.perf_counter() - began_s
    prompt = prompt_of(generator, min(settings.contexts), settings.seed)
    generator.generate(prompt, max_new_tokens=1, ignore_eos=True)
    return generator, load_s, time.perf_counter() - began_s


def prompt_of(generator: Generator, tokens: int, seed: int) -> list[int]:
    """Random tokens, which are to run from the first."""
    generator.forget()
    return random_tokens(generator.runtime.shape.vocab_size, tokens, seed)


def routes_of(generator: Generator, seed: int) -> list[Routes]:
    """Experts that each layer chose while a text was sampled."""
    lookahead = generator.runtime.engine.lookahead
    layers: list[Routes] = [[] for _ in range(lookahead.num_layers)]
    prompt = prompt_of(generator, 1, seed)
    for _ in generator.stream(prompt, max_new_tokens=ROUTED_TOKENS, seed=seed, **SAMPLED):
        for layer, routes in enumerate(layers):
            routes.append(lookahead.used[layer].ids[-1])
    return layers


def curve_of(layers: Sequence[Routes], num_experts: int) -> list[dict[str, Any]]:
    """Hits by the share of experts held, of these routes and as published."""
    return [
        {
            "share": share,
            "published": published,
            "most_used": most_used_hits(layers, num_experts, share),
            "lru": lru_hits(layers, round(share * num_experts)),
        }
        for share, published in CURVE[1:-1]
    ]


def summarise(bounds: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One row: medians over rounds, beside what was said before."""
    samples, forecast = found.pop("samples"), bounds.pop("forecasts").get(found.pop("way"))

    def middle(name: str) -> float:
        return float(median(sample[name] for sample in samples))

    times = [sample["tpot_ms"] for sample in samples]
    tpot_ms, ttft_s = middle("tpot_ms"), middle("ttft_ms") / 1e3
    moved, steady_ms = middle("moved_bytes_per_token"), middle("steady_ms")
    return {
        **bounds,
        **found,
        "samples": len(samples),
        "codec": samples[0]["codec"],
        "dense": samples[0]["dense"],
        "slots_bytes": samples[0]["memory"]["slots"],
        "tpot_ms": tpot_ms,
        "tpot_spread": (max(times) - min(times)) / tpot_ms,
        "tpot_ratio": tpot_ms / bounds["tpot_floor_ms"],
        "steady_ms": steady_ms,
        "forecast_ms": forecast,
        "forecast_error": None if forecast is None else forecast / steady_ms - 1,
        "ttft_s": ttft_s,
        "ttft_ratio": ttft_s / bounds["ttft_floor_s"],
        "prefill_tokens_per_s": bounds["context"] / middle("prefill_s"),
        "hit_rate": middle("hit_rate"),
        "moved_bytes_per_token": moved,
        "moved_ratio": ratio(moved, bounds["floor_moved_bytes"]),
        "peak_ratio": found["peak_bytes"] / bounds["budget_bytes"],
    }


def notes(report: ShapesReport) -> list[str]:
    """Say what the weights are, what the floor was computed from, and what drafted."""
    made = report.made
    return [
        f"{made['parameters'] / 1e9:.2f} billion random parameters in {made['weights']}, "
        f"{format_bytes(made['bytes'])}; their shapes: {made['source']}",
        f"floors: memory {made['memory_bytes_per_s'] / 1e9:.1f} GB/s, link "
        f"{made['link_bytes_per_s'] / 1e9:.2f} GB/s, products {made['flops_per_s'] / 1e9:.0f} "
        "Gflop/s, all measured just now; routes drawn by the routers' law, evicted by Belady",
        "drafts are off: nothing drafts random text; it is sampled at temperature 1",
        *dict.fromkeys(
            f"llama.cpp at {row['budget']}: {row['failure']}"
            for row in report.beside
            if row["failure"]
        ),
    ]
