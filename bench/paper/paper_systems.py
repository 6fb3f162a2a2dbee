"""The systems of MoE-SpeQ's Figure 13, as the planner expects them: does it put them in the paper's
order?

    transformers  experts that do not fit are moved whenever they are asked for, and not kept
    sc, sm        Mixtral-Offloading: experts in LRU slots, as many as MoE-SpeQ has (same cache), or
                  with those that its draft's memory would buy (same memory)
    moe-speq      an INT4 draft, and plain words in the slots it leaves, fetched ahead
    speq          the best way to hold experts that `speq plan` finds

All compute at the same speed here: the paper's systems differ in their kernels too, and so more.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speq.bench.settings import PaperSystemsSettings as Settings
from speq.files.atomic_file import check_target
from speq.measure.report import Column, Report
from speq.planning.assumptions import Assumptions
from speq.planning.budget_plan import BudgetPlan, plan_budget
from speq.planning.cost.locality import PUBLISHED, Locality
from speq.planning.cost.planner import Outlook
from speq.planning.cost.presets import preset
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.model_spec import ModelSpec
from speq.units import parse_bytes

# "PCIe 4.0 x16, ... 16 GB/s per direction" beside an A100 of 40 GB (MoE-SpeQ 4.1.1).
LINK_BYTES_PER_S = 16e9
PRESET = "a100-40gb"
# Acceptance "over 90 %" (4.5); 256 tokens after a prompt of GSM8K.
ACCEPTANCE = 0.9
CONTEXT = 1024
# The paper's order, fastest first: "consistently achieves the lowest TPOT", and for Phi-MoE 163.1,
# 351.8, 536.7 and 960.5 ms in this order (4.2).
PAPER_ORDER = ("moe-speq", "sm", "sc", "transformers")

COLUMNS: dict[str, Column] = {
    "model": ("model", "{}"),
    "memory": ("budget", "{}"),
    "system": ("system", "{}"),
    "slots": ("slots", "{}"),
    "of all": ("held", "{:.0%}"),
    "k": ("draft_length", "{}"),
    "ms a token": ("tpot_ms", "{:.1f}"),
    "paper's place": ("paper_place", "{}"),
    "place": ("place", "{}"),
}


def run(models: Sequence[Path], settings: Settings, json_file: Path | None, force: bool) -> Report:
    """A row for each system of each model and budget. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    rows = []
    for folder in models:
        model_spec = ModelSpec.of_config(folder.name, folder, "auto")
        for text in settings.budgets:
            budget = Budget.of(parse_bytes(text), CONTEXT, False, model_spec.shape)
            rows += [
                {"model": folder.name, "budget": text} | row for row in systems(model_spec, budget)
            ]
    report = Report("paper-systems", " ".join(f.name for f in models), settings.as_json(), rows)
    if json_file is not None:
        report.write(json_file)
    return report


def systems(model_spec: ModelSpec, budget: Budget) -> list[dict[str, Any]]:
    """Rows in the paper's order, then ours; none of the paper's where a draft does not fit."""
    experts = model_spec.shape.experts
    locality = Locality(experts.num_experts, model_spec.shape.top_k, PUBLISHED)
    machine = preset(PRESET)
    assumptions = Assumptions(machine, locality, ACCEPTANCE, LINK_BYTES_PER_S)
    made = plan_budget(model_spec, budget, assumptions)
    found = paper_systems(made, assumptions)
    ranked = sorted(PAPER_ORDER, key=lambda name: found[name].tpot_s) if found else []
    best = made.candidates[made.best]
    entries = [(name, found[name]) for name in PAPER_ORDER if found] + [("speq", best)]
    return [
        {
            "system": name,
            "codec": candidate.codec,
            "slots": candidate.slots,
            "held": candidate.slots / model_spec.count,
            "draft_length": candidate.step.draft_length,
            "tpot_ms": candidate.tpot_s * 1e3,
            "moved_bytes_per_token": candidate.moved_bytes_per_token,
            "paper_place": PAPER_ORDER.index(name) + 1 if name in PAPER_ORDER else None,
            "place": ranked.index(name) + 1 if name in PAPER_ORDER else None,
        }
        for name, candidate in entries
    ]


def paper_systems(made: BudgetPlan, assumptions: Assumptions) -> dict[str, ResidencyPlan]:
    """The paper's four systems in this budget; none where it has no room for the draft."""
    raw = {c.drafts: c for c in made.candidates if c.codec == "raw"}
    if len(raw) < 2:
        return {}
    model_spec, residency_plans = made.model_spec, list(raw.values())
    outlook = assumptions.outlook(model_spec.num_layers, model_spec.pass_bytes, residency_plans)
    same_cache = replace(raw[False], slots=raw[True].slots)
    return {
        "moe-speq": raw[True],
        "sm": raw[False],
        "sc": outlook.with_estimate(same_cache),
        "transformers": without_cache(outlook, raw[False], model_spec),
    }


def without_cache(
    outlook: Outlook, residency_plan: ResidencyPlan, model_spec: ModelSpec
) -> ResidencyPlan:
    """A fixed share of the experts is there; the others are moved at every use, and waited for."""
    absent = 1 - residency_plan.slots / model_spec.count
    moved_bytes = (
        absent * model_spec.num_layers * model_spec.shape.top_k * residency_plan.moved_bytes
    )
    step = outlook.step_estimate(residency_plan, 0)._replace(
        new_s=outlook.link.transfer_s(moved_bytes), moved_bytes=moved_bytes, exposed=1.0
    )
    return replace(residency_plan, expected=step)


def notes(report: Report) -> list[str]:
    """Where the expected order is the paper's, and where not."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report.rows:
        cases.setdefault((row["model"], row["budget"]), []).append(row)
    lines = []
    for (model, budget), rows in cases.items():
        ours = sorted((r for r in rows if r["place"] is not None), key=lambda r: r["place"])
        names = [row["system"] for row in ours]
        if not names:
            lines.append(f"{model}, {budget}: no room for the draft; nothing to compare")
        elif tuple(names) == PAPER_ORDER:
            lines.append(f"{model}, {budget}: as the paper has it")
        else:
            lines.append(f"{model}, {budget}: {' < '.join(names)}, not {' < '.join(PAPER_ORDER)}")
    return lines
