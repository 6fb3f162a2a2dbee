"""Writes the table of docs/models.md of what fits which memory: `python -m tools.memory_table`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from speq.bench.shapes.published import ROWS
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
BUDGETS_GIB = (8, 16, 32, 64)
CONTEXT = 4096
GIB = 1 << 30
# Times do not matter here.
ACCEPTANCE = 0.9


def model_specs() -> list[ModelSpec]:
    """Read every config.json, and the shapes that `speq bench shapes` has of other models; the
    smallest experts come first.
    """
    folders = {path.parent.name: path.parent for at in FOLDERS for path in at.glob("*/config.json")}
    with TemporaryDirectory(prefix="speq-") as temporary:
        for shape in ROWS:
            if not any(name.lower().startswith(shape.name.lower()) for name in folders):
                folders[shape.name] = folder = Path(temporary) / shape.name
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(shape.content(None, None)))
        found = [ModelSpec.of_config(name, folder, "auto") for name, folder in folders.items()]
    return sorted(found, key=experts_bytes)


def experts_bytes(spec: ModelSpec) -> int:
    return spec.count * spec.codec.record_range[1]


def slots(spec: ModelSpec, budget_gib: int) -> dict[tuple[str, bool], int]:
    """Expert slots that fit, by codec and whether there is an INT4 draft."""
    locality = Locality(spec.shape.experts.num_experts, spec.shape.top_k)
    given = Assumptions(preset("rtx-4090"), locality, acceptance=ACCEPTANCE)
    try:
        made = plan_budget(spec, Budget.of(budget_gib * GIB, CONTEXT, True, spec.shape), given)
    except BudgetTooSmall:
        return {}
    return {(each.codec, each.drafts): each.slots for each in made.candidates}


def share(spec: ModelSpec, count: int | None) -> str:
    if count is None:
        return "-"
    # Nearly all is not 100%.
    return "all" if count == spec.count else f"{min(0.99, count / spec.count):.0%}"


def cell(spec: ModelSpec, budget_gib: int) -> str:
    """Shares without a draft and with one, in the codecs that take least."""
    found, published = slots(spec, budget_gib), spec.codec.shape.published
    plain, drafted = ("lossless", "residual") if published == WORDS else (published, published)
    return f"{share(spec, found.get((plain, False)))}, {share(spec, found.get((drafted, True)))}"


def main() -> None:
    heads = ["model", "experts", "experts, GiB", "rest, GiB", *(f"{g} GiB" for g in BUDGETS_GIB)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for spec in model_specs():
        published = spec.codec.shape.published
        line = [
            spec.name,
            "BF16" if published == WORDS else published.upper(),
            f"{experts_bytes(spec) / GIB:.1f}",
            f"{spec.shape.resident_bytes(spec.dtype) / GIB:.1f}",
            *(cell(spec, budget) for budget in BUDGETS_GIB),
        ]
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
