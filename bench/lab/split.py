"""A GPU with its host's share of missing experts and without it: time per token, the same tokens.

Random weights in a published model's shapes are written once, of its first layers. Each budget is
run with all missing experts copied, and with a share computed on the host. The run ends with an
error if tokens differ. Those of the processor alone, with sums in the one order, are compared too,
in the last budget: attention and matrices outside the experts add up otherwise there, so a near-tie
may turn.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from bench.lab.command import main
from speq.bench.settings import Budgets
from speq.bench.shapes.checkpoint import ShapedModel, write
from speq.bench.shapes.prompts import random_tokens
from speq.bench.shapes.published import shape_named
from speq.devices.named import find_device
from speq.errors import Broken
from speq.files.cache_folder import cache_folder
from speq.generator import Generator
from speq.measure.picture import BUDGET, HITS, Axis, Picture
from speq.measure.report import Column, Report
from speq.measure.settings import MaxNewTokens, Rounds
from speq.options.declared import Option, Options
from speq.options.kinds import File, Text, Whole
from speq.units import Progress, format_bytes, parse_bytes, track


@dataclass(frozen=True, slots=True)
class SplitSettings(Options):
    """budgets: by default what 12 and 24 GiB hold of all layers, of these."""

    budgets: Budgets = ("4GiB", "7GiB")
    shapes: Annotated[str, Option("As of `speq bench shapes`.", Text("a model"))] = "Qwen3-30B-A3B"
    layers: Annotated[int, Option("Layers to write.", Whole(1))] = 12
    folder: Annotated[Path | None, Option("Where the checkpoint is kept.", File("a folder"))] = None
    prompt_tokens: Annotated[int, Option("Random tokens of a prompt.", Whole(1))] = 64
    max_new_tokens: MaxNewTokens = 32
    rounds: Rounds = 2


HOST = Axis("host_compute", "host")
COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "on": ("device", "{}"),
    "host": ("host_compute", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "on the host": ("host_experts", "{:.0f}"),
    "as copied alone": ("same_tokens", "{}"),
}
PICTURES = (
    Picture("tpot", "Time per token", (BUDGET,), (Axis("tpot_ms", "ms"),), (HOST,)),
    Picture("hits", "Experts that lay in slots when needed", (BUDGET,), (HITS,), (HOST,)),
)
MEASURED = ("tpot_ms", "ttft_ms", "hit_rate", "moved_bytes_per_token", "host_experts")


def run(settings: SplitSettings, progress: Progress | None = None) -> Report:
    """Measure the GPU. Raises SpeqError where there is none, and where tokens differ."""
    find_device("cuda").free_bytes()  # before so much is written
    model = ShapedModel.of(shape_named(settings.shapes), settings.layers, None, 0)
    folder = settings.folder or (cache_folder("shapes") or Path("shapes")) / model.name
    write(model, folder, progress=progress)
    rows = []
    for budget in track("measuring budgets", settings.budgets, len(settings.budgets), progress):
        copied, alone = measure(folder, settings, budget, device="cuda", host_compute="none")
        shared, beside = measure(folder, settings, budget, device="cuda", host_compute="auto")
        if shared != copied:
            raise Broken(f"tokens depend on the host's share, in {budget}: {shared}, {copied}")
        rows += [row | {"same_tokens": settings.rounds} for row in (alone, beside)]
    found, row = measure(folder, settings, budget, device="cpu", sums="canonical")
    rows.append(row | {"same_tokens": sum(map(list.__eq__, found, copied))})
    return Report("split", model.name, settings.as_json(), rows)


def measure(
    folder: Path, settings: SplitSettings, budget: str, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens of each round, and medians."""
    context = settings.prompt_tokens + settings.max_new_tokens
    given: dict[str, Any] = {"codec": "raw", "draft_length": 0, "context_length": context}
    generator = Generator.from_pretrained(folder, parse_bytes(budget), **given, **options)
    found, stats = [], []
    with closing(generator):
        for seed in range(-1, settings.rounds):  # the first one warms up
            prompt = random_tokens(generator.runtime.shape.vocab_size, settings.prompt_tokens, seed)
            made = generator.generate(
                prompt, max_new_tokens=settings.max_new_tokens, ignore_eos=True
            )
            found.append(made.token_ids)
            stats.append(made.stats)
    row = {name: median(each[name] for each in stats[1:]) for name in MEASURED}
    way = {"device": options["device"], "host_compute": options.get("host_compute", "all")}
    return found[1:], {"budget": budget, "budget_bytes": parse_bytes(budget), **way, **row}


if __name__ == "__main__":
    main("split")
