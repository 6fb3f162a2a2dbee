"""The protocol of Specter, the code that MoE-SpeQ's authors published, on its three models.

Prompts of 16 tokens, 128 of output, a fixed draft length, so many raw experts resident in each
layer, and slots as empty before each text as before the first. The draft runs beside the same cache
without it, beside the same memory without it (arXiv:2511.14102, 4.1.4), and beside what speq
chooses in that memory.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from speq.bench.kinds import KINDS, prompts_of_kind
from speq.bench.rivals.systems import NO_DRAFT, ON_DEMAND, PAPER
from speq.bench.rotation import rotate
from speq.bench.settings import TpotSettings as Settings
from speq.bench.synthetic import WHAT_IF, synthetic_acceptance
from speq.errors import OptionError, present
from speq.files.checkpoint import locate
from speq.generator import Generator
from speq.measure.prove import least_bytes
from speq.measure.report import Column, Report, medians_of
from speq.models.opened import open_model
from speq.planning.memory import MIN_SLOTS
from speq.planning.model_spec import ModelSpec
from speq.units import Progress, format_bytes, track

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128
# Settings that the protocol leaves to the user.
BESIDE = ("protocol", "prompts", "num_prompts", "rounds", "synthetic_acceptance", "run")
DRAFT, SAME_CACHE, SAME_MEMORY, CHOSEN = "draft", "same cache", "same memory", "speq"
# The paper's times of an NVIDIA A100 with 40 GB, over its own: where its text gives them.
PUBLISHED = {
    ("phimoe", "high", SAME_CACHE): 536.7 / 163.1,
    ("phimoe", "high", SAME_MEMORY): 351.8 / 163.1,
    ("qwen2_moe", "high", SAME_CACHE): 2.5,
}
COLUMNS: dict[str, Column] = {
    "residents": ("residents", "{}"),
    "of experts": ("num_experts", "{}"),
    "system": ("system", "{}"),
    "k": ("draft_length", "{}"),
    "budget": ("budget_bytes", format_bytes),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "of draft": ("tpot_ratio", "{:.2f}"),
    "published": ("published_ratio", "{:.2f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "hits": ("hit_rate", "{:.1%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
}
MEDIANS = ("tpot_ms", "ttft_ms", "acceptance_rate", "hit_rate", "moved_bytes_per_token")


@dataclass(frozen=True, slots=True)
class SpecterModel:
    """What Specter's protocol.json has of a model. residents: of a layer, by tier."""

    num_experts: int
    draft_length: int
    residents: Mapping[str, int]


MODELS = {
    "deepseek_v2": SpecterModel(64, 16, {"high": 16, "low": 8}),
    "qwen2_moe": SpecterModel(60, 8, {"high": 15, "low": 8}),
    "phimoe": SpecterModel(16, 16, {"high": 2, "low": 1}),
}


@dataclass(frozen=True, slots=True)
class SpecterCell:
    """A system within a tier. options: of its runs."""

    tier: str
    residents: int
    system: str
    budget_bytes: int
    options: Mapping[str, Any]


@dataclass(slots=True)
class SpecterReport(Report):
    """A row for each cell."""

    def print_all(self) -> None:
        self.print(COLUMNS)

    def remarks(self) -> list[str]:
        lines = [
            f"prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} of output, greedy; slots emptied "
            "before each text, where Specter puts its first residents back",
            "Specter ran on an A100 with 40 GB and all experts in host memory: compare ratios, "
            "and those with care; its slots bound no process's memory, and a budget here does",
        ]
        acceptance = self.settings["synthetic_acceptance"]
        return lines if acceptance is None else [*lines, WHAT_IF.format(acceptance)]


def run(model: str, settings: Settings, progress: Progress | None = None) -> SpecterReport:
    """Measure the systems of both tiers in rotation.

    Raises SpeqError for a model that Specter has not, and for options that the protocol sets.
    """
    others = replace(settings, **{name: getattr(Settings(), name) for name in BESIDE})
    if others != Settings():
        raise OptionError(
            "protocol specter sets budgets, draft lengths, lengths and systems itself; beside it "
            f"give {', '.join(BESIDE[1:-1])} and options of runs"
        )
    kind, found = model_of(model)
    kinds = settings.prompts or KINDS
    texts = [text for each in kinds for text in prompts_of_kind(each, settings.num_prompts)]
    cells = [
        cell for tier in found.residents for cell in cells_of(model, found, tier, settings.run)
    ]
    samples: dict[int, list[dict[str, Any]]] = {at: [] for at in range(len(cells))}
    turns = [at for turn in range(settings.rounds) for at in rotate([*samples], turn)]
    for at in track("measuring cells", turns, len(turns), progress):
        samples[at] += measure(model, cells[at], texts, settings.synthetic_acceptance)
    rows = [row_of(cell, samples[at], found.num_experts) for at, cell in enumerate(cells)]
    of_draft = {row["tier"]: row["tpot_ms"] for row in rows if row["system"] == DRAFT}
    for row in rows:
        row["tpot_ratio"] = row["tpot_ms"] / of_draft[row["tier"]]
        row["published_ratio"] = PUBLISHED.get((kind, row["tier"], row["system"]))
    return SpecterReport("tpot-specter", model, settings.as_json(), rows)


def model_of(model: str) -> tuple[str, SpecterModel]:
    """A model's type, and its cells. Raises SpeqError for a model that Specter has not."""
    with closing(open_model(locate(model))) as opened:
        kind, experts = opened.family.model_type, opened.shape.experts.num_experts
    found = MODELS.get(kind)
    if found is None or found.num_experts != experts:
        raise OptionError(
            f"protocol specter is of DeepSeek-V2-Lite, Qwen1.5-MoE-A2.7B and Phi-3.5-MoE, and "
            f"{model} is a {kind} of {experts} experts a layer; give one of these, or their shapes "
            "by `speq bench shapes`"
        )
    return kind, found


def cells_of(
    model: str, found: SpecterModel, tier: str, run_options: Mapping[str, Any]
) -> list[SpecterCell]:
    """A tier's systems."""
    residents, length = found.residents[tier], str(found.draft_length)
    shared = {**run_options, "context_length": PROMPT_TOKENS + OUTPUT_TOKENS}
    draft = shared | PAPER | {"draft_length": length, "drafter": "int4"}
    plain = shared | ON_DEMAND | NO_DRAFT
    cache, draft_bytes = budget_of(model, residents, plain)
    memory = cache + draft_bytes
    return [
        SpecterCell(tier, residents, DRAFT, memory, draft),
        SpecterCell(tier, residents, SAME_CACHE, cache, plain),
        SpecterCell(tier, residents, SAME_MEMORY, memory, plain),
        SpecterCell(tier, residents, CHOSEN, memory, shared),
    ]


def budget_of(model: str, residents: int, options: Mapping[str, Any]) -> tuple[int, int]:
    """The budget that leaves so many slots to each layer, and what an INT4 draft takes beside."""
    folder = locate(model)
    spec = ModelSpec.of_config(model, folder, options.get("dtype", "auto"))
    layout = present(spec.draft, f"{model} has experts that no INT4 copy is smaller than")
    with closing(open_model(folder)) as opened:
        slot_bytes, layers = opened.store.codec.slot_bytes, opened.store.num_layers
    slots = residents * layers - MIN_SLOTS
    return least_bytes(model, dict(options)) + slots * slot_bytes, spec.count * layout.nbytes


def measure(
    model: str, cell: SpecterCell, texts: list[str], acceptance: float | None
) -> list[dict[str, Any]]:
    """Figures of each text, over slots that are empty when it begins."""
    generator = Generator.from_pretrained(model, cell.budget_bytes, **cell.options)
    with closing(generator):
        prompts = [generator.encode(text)[:PROMPT_TOKENS] for text in texts]
        samples = []
        with synthetic_acceptance(generator, prompts, OUTPUT_TOKENS, acceptance):
            for prompt in prompts:
                generator.forget()
                generator.runtime.engine.offload.loader.forget()
                generator.generate(prompt, max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
                run = present(generator.last_run, "a generation has ended without statistics")
                samples.append(run.summary())
    return samples


def row_of(cell: SpecterCell, samples: list[dict[str, Any]], num_experts: int) -> dict[str, Any]:
    """Medians over texts and rounds."""
    return {
        "tier": cell.tier,
        "residents": cell.residents,
        "num_experts": num_experts,
        "system": cell.system,
        "draft_length": samples[0]["draft_length_mean"],
        "budget_bytes": cell.budget_bytes,
        "slots_bytes": samples[0]["memory"]["slots"],
        "samples": len(samples),
        **medians_of(samples, MEDIANS),
    }
