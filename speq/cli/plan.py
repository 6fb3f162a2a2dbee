"""`speq plan`: what fits a budget and what it would give, before anything is loaded."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from speq.cli import options as opt
from speq.errors import checked_choice
from speq.governor.locality import CURVES
from speq.units import format_bytes, format_rate

if TYPE_CHECKING:
    from speq.governor.presets import Rates
    from speq.governor.profile import Profile
    from speq.models.opened import Opened
    from speq.planning.assumptions import Assumptions
    from speq.planning.budget_plan import BudgetPlan
    from speq.planning.subject import Subject

# Read to measure this machine's memory: seconds, not minutes.
MEMORY_BYTES, MEMORY_READS = 256 << 20, 3


def plan(
    model: opt.ModelArgument,
    memory_budget: opt.MemoryBudget,
    preset: Annotated[
        str | None, typer.Option(help="A card or machine by name; `?` lists them.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="What brings experts, such as 25GB/s: PCIe, or a disk.")
    ] = None,
    memory_bandwidth: Annotated[
        str | None, typer.Option(help="Of the memory that weights lie in, such as 900GB/s.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What `speq tune` measured, in place of bandwidths.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded routes (`speq bench hit-rate --trace`) to count experts by."),
    ] = None,
    locality: Annotated[
        str | None,
        typer.Option(
            help=f"Whose routes to count experts by: {', '.join(CURVES)}; default: those of "
            "--trace or --profile, or else published."
        ),
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="That a drafted token stands; default: measured, or 0.9.")
    ] = None,
    context_length: opt.ContextLength = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what fits, what speed to expect with and without a draft, and where that breaks even.

    A model's config.json is enough, in a folder or on the hub: nothing is loaded. Expected times
    are good for telling ways apart; a run measures its own.
    """
    import contextlib

    from speq.config import DEVICES, DTYPES
    from speq.errors import SpeqError
    from speq.governor.presets import PRESETS
    from speq.planning.budget_plan import plan as make_plan
    from speq.planning.demand import Budget
    from speq.units import parse_bytes, parse_rate

    if preset == "?":
        show_presets(PRESETS)
        return
    checked_choice("device", device, DEVICES)
    checked_choice("dtype", dtype, ("auto", *DTYPES))
    if profile is not None and (preset is not None or memory_bandwidth is not None):
        raise SpeqError(
            "profile is given with preset or memory_bandwidth; a profile says how fast the machine "
            "computes: give one of them"
        )
    if locality is not None:
        checked_choice("locality", locality, tuple(CURVES))
        if trace is not None:
            raise SpeqError("locality and trace are given together; give one of them")
    budget_bytes = parse_bytes(memory_budget)
    link_rate = None if link is None else parse_rate("link", link)
    memory_rate = (
        None if memory_bandwidth is None else parse_rate("memory_bandwidth", memory_bandwidth)
    )
    subject, opened = subject_of(model, dtype)
    with contextlib.closing(opened) if opened else contextlib.nullcontext():
        machine = machine_of(opened, budget_bytes, device, preset, profile, link_rate, memory_rate)
    on_cpu = not machine_device(machine).startswith("cuda")
    if device != "auto":
        on_cpu = device == "cpu"
    made = make_plan(
        subject,
        Budget.of(budget_bytes, context_length, on_cpu, subject.shape),
        assumptions(subject, machine, trace, locality, acceptance, link_rate),
    )
    if as_json:
        print(json.dumps(made.to_dict()))
    else:
        show(made)


def subject_of(model: str, dtype: str) -> "tuple[Subject, Opened | None]":
    """The model to plan for, opened where its weights are at hand; they are not read."""
    from speq.files.checkpoint import has_weights, locate_config
    from speq.models.opened import open_model
    from speq.planning.subject import Subject

    path = locate_config(model)
    if not has_weights(path):
        return Subject.of_config(model, path, dtype), None
    opened = open_model(path)
    try:
        return Subject.of_model(model, opened, dtype), opened
    except BaseException:
        opened.close()
        raise


def machine_of(
    opened: "Opened | None",
    budget_bytes: int,
    device: str,
    preset: str | None,
    profile: Path | None,
    link: float | None,
    memory: float | None,
) -> "Rates | Profile":
    """What is given; or else what was tuned; or else this machine, measured; or else a preset.

    This machine stands for itself only with the model's files on it, on whose disk it depends.
    """
    from speq.governor import presets
    from speq.machine import resolve_device
    from speq.planning import profiles

    if profile is not None:
        return profiles.read(profile)
    if preset is not None:
        return presets.preset(preset).but(link, memory)
    here = resolve_device("cpu" if device == "auto" and opened is None else device).type
    if opened is not None and link is None and memory is None:
        kept = profiles.kept(profiles.key_of(opened, here, budget_bytes))
        if kept is not None:
            return kept
    if link is not None and memory is not None:
        return presets.Rates("bandwidths as given", _kind(here), link, memory)
    if opened is not None and here == "cpu":
        return measured(opened).but(link, memory)
    return presets.preset(presets.DEFAULT_PRESET[here]).but(link, memory)


def measured(opened: "Opened") -> "Rates":
    """This machine's memory and the disk that the experts lie on, in a few seconds."""
    import time

    import torch

    from speq.config import DEFAULT_READER_THREADS
    from speq.governor.presets import MEMORY_SHARE, Rates
    from speq.measure.link import link_bytes_per_s
    from speq.measure.memory_read import MemoryRead, read_gb_per_s

    device = torch.device("cpu")
    read = MemoryRead(MEMORY_BYTES, device)
    memory = read_gb_per_s(read, device, MEMORY_READS, time.perf_counter) * 1e9
    return Rates(
        "measured on this machine just now",
        "cpu",
        link_bytes_per_s(opened.store, DEFAULT_READER_THREADS),
        MEMORY_SHARE * memory,
    )


def machine_device(machine: "Rates | Profile") -> str:
    from speq.governor.presets import Rates

    return machine.device if isinstance(machine, Rates) else machine.key.device


def assumptions(
    subject: "Subject",
    machine: "Rates | Profile",
    trace: Path | None,
    locality: str | None,
    acceptance: float | None,
    link: float | None,
) -> "Assumptions":
    from speq.governor.locality import Locality
    from speq.governor.profile import Profile
    from speq.measure.route_trace import RouteTrace
    from speq.measure.routes import acceptance_of, curve_of
    from speq.planning.assumptions import DEFAULT_ACCEPTANCE, Assumptions, routes_of

    experts, top_k = subject.shape.experts, subject.shape.top_k
    curve = CURVES[locality or "published"]
    if trace is not None:
        recorded = RouteTrace.read(trace)
        curve = curve_of(recorded)
        acceptance = acceptance_of(recorded) if acceptance is None else acceptance
    if isinstance(machine, Profile):
        if trace is None and locality is None:
            curve = routes_of(machine, subject.shape) or curve
        acceptance = machine.acceptance if acceptance is None else acceptance
    return Assumptions(
        machine,
        Locality(experts.num_experts, top_k, curve),
        DEFAULT_ACCEPTANCE if acceptance is None else acceptance,
        link,
    )


def show(made: "BudgetPlan") -> None:
    """The plan as tables and sentences."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    entries, best = made.to_dict(), made.best
    items = Table(title=f"{made.subject.name} in {format_bytes(made.budget.budget_bytes)}")
    items.add_column("item")
    items.add_column("takes", justify="right")
    for name, size in entries["items"].items():
        items.add_row(name.replace("_", " "), format_bytes(size))
    items.add_row("unused", format_bytes(entries["unused_bytes"]))
    console.print(items)
    ways = Table(title="ways to hold the exact experts")
    for title in ("codec", "draft", "slots", "of all", "k", "ms a token", "from", "to", "moved"):
        ways.add_column(title, justify="right")
    for at, entry in enumerate(entries["candidates"]):
        ways.add_row(
            f"{entry['codec']}, encoded" if entry["encoded"] else entry["codec"],
            "INT4" if entry["draft"] else "none",
            str(entry["slots"]),
            f"{entry['slots'] / made.subject.count:.0%}",
            str(entry["draft_length"]),
            f"{entry['tpot_ms']:.1f}",
            f"{entry['hidden_tpot_ms']:.1f}",
            f"{entry['exposed_tpot_ms']:.1f}",
            format_bytes(entry["moved_bytes_per_token"]),
            style="bold" if at == best else None,
        )
    console.print(ways)
    for line in findings(made):
        typer.echo(line)


def findings(made: "BudgetPlan") -> list[str]:
    """What the tables do not say."""
    assumed = made.assumptions
    lines = [f"best: {made.reason}"]
    lines += [f"{name} is left out: {reason}" for name, reason in made.left_out.items()]
    lines.append(
        f"were routes independent, the worst there can be: {made.worst.partition(' (')[0]}"
    )
    if len({holding.drafts for holding in made.candidates}) == 2:
        lines.append(_acceptance_line(made.break_even_acceptance))
        link = assumed.link.bandwidth_bytes_per_s
        lines.append(_link_line(made.break_even_link_bytes_per_s, link))
    else:
        lines.append("break-even: there is nothing to compare in this budget")
    at_hand = made.subject.codec.name
    lines.append(f"the experts at hand are {at_hand}; `speq pack --codec` makes others of them")
    elsewhere = made.subject.count * made.subject.codec.shape.nbytes
    place = "on the disk" if made.budget.on_cpu else "in host memory"
    lines.append(f"all exact experts, {format_bytes(elsewhere)} as published, stay {place}")
    lines.append(
        f"assumed: {assumed.source}; {assumed.locality.source}; acceptance "
        f"{assumed.acceptance:.2f}; a context of {made.budget.context} tokens; "
        "--cache-policy lookahead, and with a draft --prefetch three-phase. From and to: all "
        "transfers hidden that can be, and none"
    )
    return lines


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


def _kind(device: str) -> Literal["cpu", "cuda"]:
    return "cpu" if device == "cpu" else "cuda"


def show_presets(presets: "dict[str, Rates]") -> None:
    from rich.console import Console
    from rich.table import Table

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
    Console().print(table)
