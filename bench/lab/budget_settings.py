"""The expert budgets that `bench.lab.budget` compares."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from bench.lab.options import BUDGET_OPTIONS, BudgetText, FixedLength
from speq.bench.settings import PromptKinds, numbers
from speq.config import RunConfig
from speq.errors import OptionError
from speq.layers.expert_budget import BudgetRules
from speq.options.declared import Nested, Option, Options
from speq.options.kinds import Choice, File, ListOf, Number, Switch, Whole


@dataclass(frozen=True, slots=True)
class BudgetSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    experts: Annotated[
        tuple[int, ...], Option("Experts of a layer, at most.", numbers(Whole(1), "8,12"))
    ] = (4, 6, 8, 12, 16, 24)
    floors: Annotated[
        tuple[float, ...],
        Option(
            "Least shares of a layer's routing weight, compared with the router's ranking.",
            ListOf(
                Number(1.0, without_minimum=True),
                "shares separated by commas, such as 0.01,0.03",
                optional=True,
            ),
        ),
    ] = (0.01, 0.03)
    rankings: Annotated[
        tuple[str, ...],
        Option("Router, static or oracle.", ListOf(Choice(("router", "static", "oracle")))),
    ] = ("router",)
    policies: Annotated[
        tuple[str, ...],
        Option("Substitute or truncate.", ListOf(Choice(("substitute", "truncate")))),
    ] = ("substitute",)
    residents: Annotated[
        tuple[str, ...],
        Option(
            "Whether experts in slots are free, or ranked like all others.",
            ListOf(Choice(("free", "ranked"))),
        ),
    ] = ("free", "ranked")
    counts: Annotated[
        Path | None,
        Option(
            "Counts for the static ranking, which `python -m bench.lab.hit_rate --counts` writes.",
            File("a file of counts", readable=True),
        ),
    ] = None
    draft_length: FixedLength = 8
    prompts: PromptKinds = ()
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 4
    max_tokens: Annotated[int, Option("Tokens of each text that are read.", Whole(2))] = 128
    max_new_tokens: Annotated[
        int, Option("Tokens of each text that is gone on with; 0: none is.", Whole(0))
    ] = 64
    reconstruction: Annotated[
        bool, Option("Also measure how far each layer's output is off, which is slow.", Switch())
    ] = False
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "tpot_slo_ms", "latency_slo_ms"),
                *BUDGET_OPTIONS,
            ),
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BudgetCase:
    """One budget. ranking: router, static or oracle; experts, floor: 0 where it has none."""

    ranking: str
    policy: str
    residents: str
    experts: int
    floor: float

    def rules(self, counts: Tensor | None) -> BudgetRules:
        """For the engine. counts: those that a static ranking goes by. The oracle ranks anew."""
        return BudgetRules(
            self.experts or None,
            self.floor,
            truncate=self.policy == "truncate",
            residents=self.residents == "free",
            counts=counts if self.ranking == "static" else None,
        )

    def row(self) -> dict[str, object]:
        return {
            "ranking": self.ranking,
            "policy": self.policy,
            "residents": self.residents,
            "experts": self.experts or None,
            "floor": self.floor or None,
        }


def budget_cases(settings: BudgetSettings, num_experts: int, top_k: int) -> list[BudgetCase]:
    """All of them, in the order of the table. Raises SpeqError for budgets that no layer has."""
    for experts in settings.experts:
        if not top_k <= experts <= num_experts:
            raise OptionError(
                f"experts is {experts}; each token chooses {top_k} of {num_experts} in a layer, so "
                f"give {top_k} to {num_experts}"
            )
    if ("static" in settings.rankings) != (settings.counts is not None):
        raise OptionError(
            "the static ranking goes by counts of another text; give both, static among rankings "
            "and counts, or neither"
        )
    return list(_products(settings))


def _products(settings: BudgetSettings) -> Iterator[BudgetCase]:
    for ranking, policy in product(settings.rankings, settings.policies):
        # What an oracle keeps depends on no slot.
        held = ("ranked",) if ranking == "oracle" else settings.residents
        for residents, experts in product(held, settings.experts):
            yield BudgetCase(ranking, policy, residents, experts, 0.0)
    if "router" in settings.rankings:
        for policy, floor in product(settings.policies, settings.floors):
            yield BudgetCase("router", policy, "free", 0, floor)
