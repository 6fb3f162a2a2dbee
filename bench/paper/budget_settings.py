"""The expert budgets that `speq bench budget` compares."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from speq.bench.settings import BudgetSettings
from speq.errors import SpeqError
from speq.layers.expert_budget import BudgetRules


@dataclass(frozen=True, slots=True)
class Compared:
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


def compared(settings: BudgetSettings, num_experts: int, top_k: int) -> list[Compared]:
    """All of them, in the order of the table. Raises SpeqError for budgets that no layer has."""
    for experts in settings.experts:
        if not top_k <= experts <= num_experts:
            raise SpeqError(
                f"experts is {experts}; each token chooses {top_k} of {num_experts} in a layer, so "
                f"give {top_k} to {num_experts}"
            )
    if ("static" in settings.rankings) != (settings.counts is not None):
        raise SpeqError(
            "the static ranking goes by counts of another text; give both, static among rankings "
            "and counts, or neither"
        )
    return list(_products(settings))


def _products(settings: BudgetSettings) -> Iterator[Compared]:
    for ranking, policy in product(settings.rankings, settings.policies):
        # What an oracle keeps depends on no slot.
        held = ("ranked",) if ranking == "oracle" else settings.residents
        for residents, experts in product(held, settings.experts):
            yield Compared(ranking, policy, residents, experts, 0.0)
    if "router" in settings.rankings:
        for policy, floor in product(settings.policies, settings.floors):
            yield Compared("router", policy, "free", 0, floor)
