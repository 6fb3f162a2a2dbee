"""Expert budgets beside the exact model: bytes and time against quality (MoE-Spec, section 4).

Every text is first read in windows, as if all drafts stood, once exactly and once within each
budget, whose entries of earlier tokens are then budgeted too. Then it is gone on with freely, with
real drafts. What an oracle would keep, and how far layers' outputs are off, is worked out from the
outputs of all experts, on the exact model's way through the text.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.lab.budget_quality import Quality, mean, rouge_l
from bench.lab.budget_settings import BudgetCase, BudgetSettings, budget_cases
from bench.lab.command import main
from bench.lab.expert_outputs import Study
from speq.bench.kinds import texts_of
from speq.bench.rotation import rotate
from speq.config import SamplingParams
from speq.engine.draft import Draft, Outcome
from speq.engine.drafter import DraftLimits
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.engine.sampler import HostSampler
from speq.engine.verification import EagerVerification
from speq.errors import Broken, OptionError, present
from speq.generator import Generator
from speq.layers.exact_experts import ExactExperts
from speq.layers.expert_budget import BudgetRules, PredictedBudget
from speq.layers.expert_counts import ExpertCounts
from speq.measure.picture import Axis, Picture
from speq.measure.probe import follow, verify
from speq.measure.report import Column, Report, print_table
from speq.stats import ApproximationStats, ratio
from speq.units import Progress, format_bytes, track

EXACT = "exact"
# A token that is certain to stand, as a lead in logits: forced texts do.
CERTAIN = 100.0

BUDGET_COLUMNS: dict[str, Column] = {
    "ranked by": ("ranking", "{}"),
    "policy": ("policy", "{}"),
    "residents": ("residents", "{}"),
    "experts": ("experts", "{}"),
    "floor": ("floor", "{}"),
}
COLUMNS: dict[str, Column] = BUDGET_COLUMNS | {
    "moved/token": ("moved", "{:.2f}"),
    "MB/token": ("moved_mb", "{:.2f}"),
    "distinct": ("distinct", "{:.2f}"),
    "dropped": ("dropped_share", "{:.1%}"),
    "nats added": ("nats_added", "{:+.4f}"),
    "+-": ("nats_added_error", "{:.4f}"),
    "KL": ("kl", "{:.4f}"),
    "same token": ("same_token", "{:.1%}"),
    "layers off": ("reconstruction_error", "{:.1%}"),
}
WAY = (
    *(Axis("ranking", "ranking"), Axis("policy", "policy"), Axis("residents", "residents")),
    Axis("floor", "floor"),
)
BYTES = Axis("moved_mb", "moved per token, MB")
PICTURES = (
    Picture("nats", "What bytes buy", (BYTES,), (Axis("nats_added", "nats"),), WAY, mark="lines"),
    Picture(
        *("time", "What time buys", (Axis("tpot_of_exact", "time, of the exact model's"),)),
        (Axis("nats_added", "nats"),),
        WAY,
        mark="lines",
    ),
)
FREE_COLUMNS: dict[str, Column] = BUDGET_COLUMNS | {
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "of exact": ("tpot_of_exact", "{:.3f}"),
    "MB/token": ("free_moved_mb", "{:.2f}"),
    "tokens/step": ("accept_length", "{:.2f}"),
    "selecting": ("select_share", "{:.1%}"),
    "dropped": ("free_dropped_share", "{:.1%}"),
    "ROUGE-L": ("rouge_l", "{:.3f}"),
    "same text": ("same_prefix", "{:.1%}"),
}


@dataclass(slots=True)
class Forced:
    """A budget over all texts, read in windows.

    moved, moved_bytes  into slots; served, visits: distinct experts of a layer, and layers
    """

    quality: Quality = field(default_factory=Quality)
    tokens: int = 0
    moved: int = 0
    moved_bytes: int = 0
    served: int = 0
    visits: int = 0
    kept: ApproximationStats = field(default_factory=ApproximationStats)

    def row(self) -> dict[str, Any]:
        return self.quality.row() | {
            "moved": self.moved / self.tokens,
            "moved_bytes_per_token": self.moved_bytes / self.tokens,
            "moved_mb": self.moved_bytes / self.tokens / 1e6,
            "distinct": self.served / self.visits,
            "dropped_share": ratio(self.kept.wanted - self.kept.kept, self.kept.wanted) or 0.0,
        }


@dataclass(slots=True)
class Free:
    """Texts that were gone on with, one behind the other."""

    texts: list[list[int]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)

    def row(self, exact: "Free") -> dict[str, Any]:
        pairs = list(zip(exact.texts, self.texts, strict=True))
        steps = sum(stats["steps"] for stats in self.stats)
        tokens = sum(stats["new_tokens"] - 1 for stats in self.stats)
        took_s = sum(stats["tpot_ms"] * (stats["new_tokens"] - 1) for stats in self.stats) / 1e3
        moved = sum(stats["moved_bytes"] for stats in self.stats)
        budgets = [stats["budget"] for stats in self.stats if stats["budget"] is not None]
        return {
            "tpot_ms": took_s * 1e3 / tokens,
            "accept_length": tokens / steps,
            "free_moved_bytes_per_token": moved / tokens,
            "free_moved_mb": moved / tokens / 1e6,
            "select_share": sum(stats["select_s"] for stats in self.stats) / took_s,
            "free_dropped_share": mean([each["dropped_share"] for each in budgets])
            if budgets
            else 0.0,
            "rouge_l": mean([rouge_l(*pair) for pair in pairs]),
            "same_prefix": mean([common_prefix(*pair) / len(pair[0]) for pair in pairs]),
        }


def common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens at the beginning of both."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def run(model: str, settings: BudgetSettings, progress: Progress | None = None) -> Report:
    """Compare. Raises SpeqError for nonsense settings."""
    texts = [text for _, text in texts_of(settings.prompts, settings.num_prompts)]
    forced = {"drafter": "ngram", "draft": "none", "prefetch": "none"}
    with closing(load_generator(model, settings, forced, progress)) as generator:
        bench = Bench(generator, settings, texts)
        rows = bench.rows(progress)
    if settings.max_new_tokens:
        with closing(load_generator(model, settings, {}, progress)) as generator:
            check_drafts(generator)
            for row, more in zip(
                rows, Bench(generator, settings, texts).free(progress), strict=True
            ):
                row.update(more)
    return Report("budget", model, settings.as_json() | bench.sizes, rows)


def show(report: Report) -> None:
    report.print(COLUMNS)
    rows = [row for row in report.rows if row.get("tpot_ms") is not None]
    if rows:
        print_table("gone on with freely", FREE_COLUMNS, rows)


def notes(report: Report) -> list[str]:
    """What readers of the table need to know besides."""
    given = report.settings
    return [
        f"{given['slots']} slots, {given['slots_share']:.0%} of the experts; windows of "
        f"{given['draft_length'] + 1} tokens, moved on demand. Within a budget nothing is exact",
    ]


def load_generator(
    model: str, settings: BudgetSettings, instead: dict[str, Any], progress: Progress | None
) -> Generator:
    """A generator whose budget is one of all experts, to be exchanged."""
    options = {
        "draft_length": settings.draft_length,
        "expert_budget": 1.0,
        "expert_audit": 0.0,
        **settings.run,
        **instead,
    }
    return Generator.from_pretrained(model, settings.memory_budget, progress=progress, **options)


def check_drafts(generator: Generator) -> None:
    """Raise SpeqError where nothing drafts: no verification is then within a budget."""
    runtime = generator.runtime
    if not runtime.residency_plan.drafts:
        raise OptionError(
            f"nothing drafts within the memory budget {format_bytes(runtime.config.memory_budget)},"
            " and no expert budget bounds anything; give a larger one, drafter ngram, or "
            "max_new_tokens 0"
        )


class Bench:
    """Budgets over texts, on one loaded model."""

    def __init__(self, generator: Generator, settings: BudgetSettings, texts: list[str]) -> None:
        self.generator, self.settings = generator, settings
        self.texts = [generator.encode(text)[: settings.max_tokens] for text in texts]
        if any(len(text) < 2 for text in self.texts):
            raise OptionError("a prompt has a single token, of which none follows; leave it out")
        longest = max(map(len, self.texts)) + settings.max_new_tokens + settings.draft_length + 1
        generator.reserve(min(longest, generator.max_context))
        runtime = generator.runtime
        experts, top_k = runtime.shape.experts, runtime.shape.top_k
        self.num_layers, self.num_experts = len(experts.layers), experts.num_experts
        self.budgets = budget_cases(settings, self.num_experts, top_k)
        self.counts: Tensor | None = None
        if settings.counts is not None:
            known = ExpertCounts.read(settings.counts)
            known.check_sizes(settings.counts, self.num_layers, self.num_experts, top_k)
            self.counts = torch.tensor(known.counts)

    @property
    def engine(self) -> Engine:
        return self.generator.runtime.engine

    @property
    def sizes(self) -> dict[str, Any]:
        slots = self.generator.runtime.plan.slots
        return {"slots": slots, "slots_share": slots / (self.num_layers * self.num_experts)}

    def rows(self, progress: Progress | None) -> list[dict[str, Any]]:
        """The exact model's, and each budget's."""
        every: list[BudgetCase | str] = [EXACT, *self.budgets]
        found = {each: Forced() for each in every}
        turns = [(text, budget) for text in self.texts for budget in found]
        exact = torch.empty(0)
        for token_ids, budget in track("reading texts", turns, len(turns), progress):
            with self.within(budget):
                logits = self.read(token_ids, found[budget])
            exact = logits if budget == EXACT else exact
            found[budget].quality.add(token_ids, exact, logits)
        errors = self.reconstructed(progress)
        rows = []
        for budget, forced in found.items():
            row = forced.row()
            row |= {"reconstruction_error": None, "errors_by_layer": None} | errors.get(budget, {})
            if isinstance(budget, str):
                names = dict.fromkeys(("policy", "residents", "experts", "floor"))
                rows.append({"ranking": EXACT} | names | row)
                continue
            if budget.ranking == "oracle":  # all experts were moved
                row |= dict.fromkeys(
                    ("moved", "moved_bytes_per_token", "moved_mb", "distinct", "dropped_share")
                )
            rows.append(budget.row() | row)
        return rows

    @contextmanager
    def within(self, budget: BudgetCase | str) -> Iterator[None]:
        """Verifications in the block are exact, or within a budget."""
        engine = self.engine
        approximation = present(engine.approximation, "a run without an expert budget is given one")
        verification = engine.verification
        if isinstance(budget, str):
            engine.approximation = None
        elif budget.ranking == "oracle":
            engine.approximation = None
            study = replace(self.study(), goes_on=budget)
            engine.verification = EagerVerification(engine.model, study)
        else:
            self.set_rules(budget.rules(self.counts))
        try:
            yield
        finally:
            engine.approximation, engine.verification = approximation, verification

    def set_rules(self, rules: BudgetRules) -> None:
        engine = self.engine
        present(engine.offload.budget, "a run without an expert budget is given one").rules = rules
        engine.offload.prefetcher.allowance = PredictedBudget(
            rules, engine.model.gates, self.num_experts
        )

    def study(self) -> Study:
        target = self.engine.offload.target
        if not isinstance(target, ExactExperts):
            raise Broken("outputs of experts are studied that are not exact")
        return Study(target, self.engine.model.gates, self.num_experts, counts=self.counts)

    def read(self, token_ids: list[int], found: Forced) -> Tensor:
        """[T, V] logits of a text, read in windows as verifications of drafts that stand."""
        engine, rows = self.engine, self.settings.draft_length + 1
        engine.begin_prefill(Request(token_ids, SamplingParams(max_new_tokens=1)))
        logits = []
        for start in range(0, len(token_ids), rows):
            tokens = token_ids[start : start + rows]
            step = engine.recorder.begin("forced")
            engine.offload.prefetcher.begin(len(tokens) - 1)
            draft = Draft.chain(tokens[1:], [CERTAIN] * (len(tokens) - 1))
            scored = verify(engine, tokens[0], draft)
            follow(engine, tokens, scored)
            engine.offload.loader.report()
            logits.append(scored.logits.float().cpu().clone())
            found.tokens += len(tokens)
            found.moved += step.moved
            found.moved_bytes += step.moved_bytes
            found.served += step.requests
            found.visits += step.layers
            self.note(draft, scored, found)
        return torch.cat(logits)

    def note(self, draft: Draft, scored: Any, found: Forced) -> None:
        """What a budget kept of a window, all of which stands."""
        approximation = self.engine.approximation
        if approximation is None:
            return
        every = Outcome([*range(draft.nodes)], [0] * draft.nodes)
        step = RequestStep(
            Request([0], SamplingParams()),
            self.engine.caches[0],
            self.engine.drafters[0],
            DraftLimits(0),
            draft,
            outcome=every,
        )
        kept = approximation.report(step, scored, HostSampler())
        if kept is not None:
            found.kept.add(kept)

    def reconstructed(self, progress: Progress | None) -> dict[BudgetCase | str, dict[str, Any]]:
        """How far each layer's output is off (Figure 6), on the exact model's way."""
        by_rank = [each for each in self.budgets if each.experts and each.residents == "ranked"]
        if not self.settings.reconstruction or not by_rank:
            return {}
        engine = self.engine
        study = replace(self.study(), compared=by_rank)
        approximation, verification = engine.approximation, engine.verification
        engine.approximation = None
        engine.verification = EagerVerification(engine.model, study)
        try:
            for token_ids in track("running all experts", self.texts, len(self.texts), progress):
                self.read(token_ids, Forced())
        finally:
            engine.approximation, engine.verification = approximation, verification
        return {
            budget: {
                "reconstruction_error": mean(found.by_layer),
                "errors_by_layer": found.by_layer,
            }
            for budget, found in study.found.items()
        }

    def free(self, progress: Progress | None) -> list[dict[str, Any]]:
        """Every text gone on with, exactly and within each budget but the oracle's, in turns."""
        every: list[BudgetCase | str] = [EXACT, *self.budgets]
        ran = [each for each in every if isinstance(each, str) or each.ranking != "oracle"]
        found = {each: Free() for each in ran}
        turns = [(text, budget) for at, text in enumerate(self.texts) for budget in rotate(ran, at)]
        for token_ids, budget in track("going on with texts", turns, len(turns), progress):
            with self.within(budget):
                self.generator.forget()
                result = self.generator.generate(
                    token_ids, max_new_tokens=self.settings.max_new_tokens, ignore_eos=True
                )
            found[budget].texts.append(result.token_ids)
            found[budget].stats.append(result.stats)
        rows = []
        for budget in every:
            if budget not in found:
                rows.append(dict.fromkeys(FREE_FIGURES))
                continue
            row = found[budget].row(found[EXACT])
            exact_ms = found[EXACT].row(found[EXACT])["tpot_ms"]
            rows.append(row | {"tpot_of_exact": row["tpot_ms"] / exact_ms})
        return rows


FREE_FIGURES = (
    *("tpot_ms", "accept_length", "free_moved_bytes_per_token", "free_moved_mb", "select_share"),
    *("free_dropped_share", "rouge_l", "same_prefix", "tpot_of_exact"),
)


if __name__ == "__main__":
    main("budget")
