"""Writes the table of docs/models.md of what fits which memory: `python -m tools.memory_table`."""

from functools import partial
from pathlib import Path

from speq.files.published_format import WORDS
from speq.planning.assumptions import Assumptions
from speq.planning.budget_plan import plan_budget
from speq.planning.cost.locality import Locality
from speq.planning.cost.presets import preset
from speq.planning.demand import Budget
from speq.planning.memory import BudgetTooSmall
from speq.planning.model_spec import ModelSpec

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "tests/data/configs", ROOT / "tests/data/published")
BUDGETS_GIB = (16, 32, 64, 128)
CONTEXT = 4096
GIB = 1 << 30
# Times do not matter here.
ACCEPTANCE = 0.9


def subjects() -> list[ModelSpec]:
    """Of every config.json, the smallest experts first."""
    configs = [path for folder in FOLDERS for path in folder.glob("*/config.json")]
    found = [ModelSpec.of_config(each.parent.name, each.parent, "auto") for each in sorted(configs)]
    return sorted(found, key=experts_bytes)


def experts_bytes(of: ModelSpec) -> int:
    return of.count * of.codec.record_range[1]


def slots(of: ModelSpec, budget_gib: int) -> dict[tuple[str, bool], int]:
    """By codec, and whether an INT4 draft lies beside, what fits."""
    experts = of.shape.experts
    locality = Locality(experts.num_experts, of.shape.top_k)
    given = Assumptions(preset("rtx-4090"), locality, acceptance=ACCEPTANCE)
    try:
        made = plan_budget(of, Budget.of(budget_gib * GIB, CONTEXT, True, of.shape), given)
    except BudgetTooSmall:
        return {}
    return {(each.codec, each.drafts): each.slots for each in made.candidates}


def share(of: ModelSpec, found: dict[tuple[str, bool], int], way: tuple[str, bool]) -> str:
    count = found.get(way)
    if count is None:
        return "-"
    # Nearly all is not 100%.
    return "all" if count == of.count else f"{min(0.99, count / of.count):.0%}"


def cells(of: ModelSpec, budget_gib: int) -> str:
    """Without a draft and beside one, in the codecs that take least."""
    found, published = slots(of, budget_gib), of.codec.shape.published
    plain, beside = ("lossless", "residual") if published == WORDS else (published, published)
    shown = partial(share, of, found)
    return f"{shown((plain, False))}, {shown((beside, True))}"


def main() -> None:
    heads = ["model", "experts", "experts, GiB", "rest, GiB", *(f"{g} GiB" for g in BUDGETS_GIB)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for of in subjects():
        published = of.codec.shape.published
        line = [
            of.name,
            "BF16" if published == WORDS else published.upper(),
            f"{experts_bytes(of) / GIB:.1f}",
            f"{of.shape.resident_bytes(of.dtype) / GIB:.1f}",
            *(cells(of, budget) for budget in BUDGETS_GIB),
        ]
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
