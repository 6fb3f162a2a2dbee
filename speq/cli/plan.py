"""`speq plan`: what fits a budget and what it would give, before anything is loaded."""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt
from speq.config import Model
from speq.errors import present
from speq.measure.settings import PlanSettings
from speq.options.declared import Option, Options
from speq.options.kinds import Switch
from speq.units import format_bytes, format_forecast, format_rate

if TYPE_CHECKING:
    from speq.measure.verdict import BudgetRow
    from speq.planning.budget_plan import BudgetPlan
    from speq.planning.cost.presets import Rates


@dataclass(frozen=True, slots=True)
class ShownInstead(Options):
    """What `plan` prints instead of a plan."""

    accuracy: Annotated[
        bool,
        Option(
            "Print how far forecasts were off in runs of this machine, whatever the model.",
            Switch(),
        ),
    ] = False


def plan(model: Model, settings: PlanSettings, shown: ShownInstead, output: opt.Output) -> None:
    """Say whether a model runs here and how fast, what fits, and where a draft breaks even.

    A model's config.json is enough, in a folder or on the hub: nothing is loaded. This machine's
    memory and disk are measured once, in some seconds. Expected times are good for telling ways
    apart; a run measures its own.
    """
    from speq.planning.cost.presets import PRESETS

    if settings.preset == "?":
        show_presets(PRESETS)
        return
    if shown.accuracy:
        show_accuracy(output)
        return
    from speq.files.cache_folder import hub_folder
    from speq.machine import machine_memory_bytes
    from speq.measure.plan import PlannedModel
    from speq.measure.verdict import budgets_for, does_not_run, plans_in, rows_of, verdict_of
    from speq.planning.memory import BudgetTooSmall

    output.check()
    with output.progress() as progress:
        planned = PlannedModel.of(model, settings, progress)
    folder = None if planned.is_here else hub_folder()
    try:
        made = planned.plan(settings.memory_budget)
    except BudgetTooSmall as error:
        raise does_not_run(planned.model_spec, error, folder) from error

    def ratio_of(made: "BudgetPlan") -> float:
        return made.correction if settings.of_this_machine else 1.0

    ratio = ratio_of(made)
    verdict = verdict_of(made, planned.flops_per_s, folder, ratio)
    sizes = {settings.memory_budget, *budgets_for(made, machine_memory_bytes())}
    with opt.log_of(quiet=True):  # of each budget it would say the same
        instead = {name: other.plan for name, other in planned.instead().items()}
        rows = [*rows_of(plans_in(planned.plan, sorted(sizes)), instead, ratio_of)]
    told = {"verdict": verdict.to_dict(), "by_budget": [row.to_dict() for row in rows]}
    output.write(made.to_dict() | told)
    if not output.printed:
        typer.echo(verdict.sentence)
        if ratio != 1:
            output.note(
                f"speed is corrected by runs of this model in such a budget: they took "
                f"{ratio:.2f} of the time planned for it"
            )
        show_rows(rows, settings.memory_budget)
        show(made)
        for line in findings(made):
            output.note(line)


def show_accuracy(output: opt.Output) -> None:
    """What was expected of the runs that this machine keeps, and what came."""
    from speq.planning import forecasts

    output.check()
    runs = forecasts.kept()
    output.write({"runs": [asdict(run) | {"off": run.off} for run in runs]})
    if output.printed:
        return
    if not runs:
        typer.echo(
            "No run of this machine is kept yet: those of some tens of tokens are, with --profile "
            "auto."
        )
        return
    from rich.table import Table

    from speq.measure.console import console

    table = Table(title="ms per token: expected and measured")
    for title in ("model", "budget", "expected", "from", "to", "measured", "off", "tokens", "on"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for run in runs:
        table.add_row(
            run.model,
            format_bytes(run.budget_bytes),
            *(f"{each * 1e3:.3g}" for each in (run.expected_s, run.hidden_s, run.exposed_s)),
            f"{run.measured_s * 1e3:.3g}",
            f"{run.off:+.0%}",
            str(run.tokens),
            time.strftime("%Y-%m-%d", time.localtime(run.ended_at)),
        )
    console().print(table)
    off, inside = median(abs(run.off) for run in runs), sum(run.in_range for run in runs)
    typer.echo(
        f"Runs: {len(runs)}. Half were off by {off:.0%} or less; {inside} lay between from and to."
    )


def show_rows(rows: "list[BudgetRow]", chosen: int) -> None:
    """The table over budgets, in which the one that was asked for stands out."""
    from rich.table import Table

    from speq.measure.console import console

    others = dict.fromkeys(name for row in rows for name in row.instead)
    table = Table(title="speed by memory, and what would help")
    for title in ("memory", "experts in slots", "tokens/s", "from", "to", *others):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            format_bytes(row.budget_bytes),
            f"{row.cached:.0%}",
            *row.pace.numbers,
            *(
                format_forecast(row.instead[name]) if name in row.instead else "-"
                for name in others
            ),
            style="bold" if row.budget_bytes == chosen else None,
        )
    console().print(table)


def show(made: "BudgetPlan") -> None:
    """The plan as tables."""
    from rich.table import Table

    from speq.measure.console import console

    entries, best = made.to_dict(), made.best
    items = Table(title=f"{made.model_spec.name} in {format_bytes(made.budget.budget_bytes)}")
    items.add_column("item")
    items.add_column("takes", justify="right")
    for name, size in entries["items"].items():
        items.add_row(name.replace("_", " "), format_bytes(size))
    items.add_row("unused", format_bytes(entries["unused_bytes"]))
    console().print(items)
    candidates = Table(title="ways to hold the exact experts")
    for title in ("codec", "draft", "slots", "of all", "k", "ms a token", "from", "to", "moved"):
        candidates.add_column(title, justify="right")
    for at, entry in enumerate(entries["candidates"]):
        candidates.add_row(
            f"{entry['codec']}, encoded" if entry["encoded"] else entry["codec"],
            _draft_of(entry),
            str(entry["slots"]),
            f"{entry['slots'] / made.model_spec.count:.0%}",
            str(entry["draft_length"]),
            f"{entry['tpot_ms']:.1f}",
            f"{entry['hidden_tpot_ms']:.1f}",
            f"{entry['exposed_tpot_ms']:.1f}",
            format_bytes(entry["moved_bytes_per_token"]),
            style="bold" if at == best else None,
        )
    console().print(candidates)


def _draft_of(entry: dict[str, Any]) -> str:
    if entry["drafter"] != "int4":
        return str(entry["drafter"])
    part = entry["draft_experts"]
    return "INT4" if part is None else f"INT4 of {part}"


def findings(made: "BudgetPlan") -> list[str]:
    """What the tables do not say."""
    from speq.files.published_format import DECODED, WORDS

    assumed = made.assumptions
    lines = [f"best: {made.reason}"]
    if made.budget.batch_size > 1:
        lines.append(
            f"memory is for {made.budget.batch_size} sequences, and times are for one alone"
        )
    lines += [f"left out: {name}, {reason}" for name, reason in made.left_out.items()]
    lines.append(
        f"were routes independent, the worst there can be: {made.worst.partition(' (')[0]}"
    )
    if {"none", "int4"} <= {residency_plan.drafter for residency_plan in made.candidates}:
        lines.append(_acceptance_line(made.break_even_acceptance))
        link = assumed.link.bandwidth_bytes_per_s
        lines.append(_link_line(made.break_even_link_bytes_per_s, link))
    else:
        lines.append("break-even: there is nothing to compare in this budget")
    if made.with_head is not None:
        lines.append(_head_line(made))
    link, host = assumed.link.bandwidth_bytes_per_s, assumed.on_host_bytes_per_s
    if host:
        untried = "" if assumed.host_bytes_per_s is None else "; no card has run this"
        lines.append(
            f"of missing experts the processor computes {max(1 - link / host, 0):.0%}, and the "
            f"others are copied meanwhile{untried}"
        )
    held = made.candidates[made.best].peers
    if held:
        there, hits = made.hit_rates
        lines.append(
            f"further GPUs hold {' and '.join(map(str, held))} of the "
            f"{made.model_spec.shape.experts.num_experts} experts of each layer, which are "
            f"{there:.0%} of what tokens choose; with slots of the first one, {hits:.0%} are hits. "
            "This is computed; no run has had several GPUs"
        )
    if made.host_draft is not None:
        draft = made.host_draft
        lines.append(
            f"with the draft's experts on the host: k={draft.step.draft_length}, "
            f"{draft.slots} slots, {draft.tpot_s * 1e3:.1f} ms a token expected; no run drafts so"
        )
    form = made.model_spec.dense
    if form.name != "raw":
        lines.append(
            f"weights outside the experts are {form.name}: matrices of "
            f"{format_bytes(sum(form.words_bytes))} take about {format_bytes(form.nbytes)}"
        )
    tables = made.model_spec.shape.tables
    if tables:
        size = sum(rows * width for rows, width in tables) * made.model_spec.dtype.itemsize
        lines.append(
            f"tables of n-grams, {format_bytes(size)}, stay on the disk; tokens read rows of them"
        )
    codec = made.model_spec.codec
    in_words = codec.shape.published == WORDS
    others = "`speq pack --codec` makes others of them" if in_words else "as they are published"
    lines.append(f"the experts at hand are {codec.name}; {others}")
    if made.model_spec.codes_bytes:
        lines.append(DECODED)
    elsewhere = made.model_spec.count * made.model_spec.published_bytes
    if made.host is None:
        place = "on the disk" if made.budget.on_cpu else "in host memory"
        lines.append(f"all exact experts, {format_bytes(elsewhere)} as published, stay {place}")
    else:
        lines.append(f"{made.host.sentence} ({format_bytes(elsewhere)} as published)")
    lines.append(
        f"assumed: {assumed.source}; {assumed.locality.source}; acceptance "
        f"{assumed.acceptance:.2f}; a context of {made.budget.context} tokens; "
        "--cache-policy lookahead, and with a draft --prefetch three-phase. From and to: all "
        "transfers hidden that can be, and none"
    )
    return lines


def _head_line(made: "BudgetPlan") -> str:
    no_head, context = "a plan without a head is to tell of one", made.budget.context
    held, head = present(made.with_head, no_head), present(made.model_spec.head, no_head)
    elements = made.budget.batch_size * context * head.kv_elements_per_token
    kv_bytes = elements * made.model_spec.dtype.itemsize
    return (
        f"with --drafter head: the head takes {format_bytes(held.items['head'])} and "
        f"{format_bytes(kv_bytes)} of the KV cache, which leaves {held.slots} slots; "
        + (_stand_line(made.model_spec.head_acceptance) or "a run measures whether it pays")
    )


def _stand_line(stand: tuple[float, ...]) -> str:
    shares = ", ".join(f"{share:.0%}" for share in stand)
    return shares and f"in training, {shares} of its tokens were accepted, by depth"


def _acceptance_line(value: float | None) -> str:
    if value is None:
        return "break-even: speculation does not pay here, at any acceptance"
    if value == 0:
        return "break-even: speculation pays here at any acceptance"
    return f"break-even: speculation pays here from an acceptance of {value:.2f} on"


def _link_line(value: float | None, at_hand: float) -> str:
    here = f"this one gives {format_rate(at_hand)}"
    if value is None:
        return f"break-even: no link is so fast that speculation would not be needed; {here}"
    if value == 0:
        return f"break-even: speculation is not needed over any link; {here}"
    return f"break-even: speculation is not needed over links from {format_rate(value)}; {here}"


def show_presets(presets: "dict[str, Rates]") -> None:
    from rich.table import Table

    from speq.measure.console import console

    table = Table(title="presets")
    for title in ("preset", "link", "memory", "from"):
        table.add_column(title)
    for name, rates in presets.items():
        table.add_row(
            name,
            format_rate(rates.link_bytes_per_s),
            format_rate(rates.memory_bytes_per_s),
            rates.source,
        )
    console().print(table)
