"""`speq tune`: measures a model on this machine, for plans, and for what runs choose by them."""

import json
from typing import TYPE_CHECKING

from speq.cli import options as opt
from speq.config import Model
from speq.measure.settings import TuneSettings
from speq.units import format_bytes, format_rate

if TYPE_CHECKING:
    from speq.governor.profile import Profile


def tune(model: Model, settings: TuneSettings, output: opt.Output) -> None:
    """Measure the link, drafts, verifications and codecs of a model under a budget.

    What is kept holds for this model, device, budget and version; runs and `speq plan` with the
    same budget go by it. Nothing else should use the machine meanwhile. Beside the budget it takes
    memory for a layer of experts.
    """
    from speq.measure.tune import tune_with

    output.check()
    with output.progress() as progress:
        made = tune_with(model, settings, output.force, progress)
    profile, key = made.profile, made.profile.key
    output.write(json.loads(profile.to_json()))
    if not output.printed:
        show(profile)
        output.note(f"{made.path}: for {key.device} and {format_bytes(key.budget_bytes)}")
        if made.counts_path is not None:
            output.note(f"{made.counts_path}: how often each expert was used")


def show(profile: "Profile") -> None:
    """The profile as a table."""
    from rich.table import Table

    from speq.governor.speedup_model import target_efficiency
    from speq.measure.console import console

    table = Table(title="measured")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for size, speed in profile.link:
        table.add_row(f"link, {format_bytes(size)} at a time", format_rate(speed))
    table.add_row("first expert", f"{profile.first_fetch_s * 1e3:.2f} ms")
    if profile.draft_token_s:
        table.add_row("a draft", f"{profile.draft_base_s * 1e3:.1f} ms")
        table.add_row("each of its tokens", f"{profile.draft_token_s * 1e3:.1f} ms")
    distinct, single_s = dict(profile.distinct), profile.verify[0][1]
    for rows, verify_s in profile.verify:
        experts = f", {distinct[rows]:.0f} experts" if rows in distinct else ""
        table.add_row(f"verification of {rows:.0f}{experts}", f"{verify_s * 1e3:.1f} ms")
    for rows, verify_s in profile.verify[1:]:
        efficiency = target_efficiency(single_s, verify_s)
        table.add_row(f"target efficiency, T(1) / T({rows:.0f})", f"{efficiency:.2f}")
    for codec, speed in profile.decode_bytes_per_s.items():
        table.add_row(f"{codec} experts, as words", format_rate(speed))
    for codec, speed in profile.encode_bytes_per_s.items():
        table.add_row(f"{codec} experts encoded, as words", format_rate(speed))
    if profile.acceptance is not None:
        table.add_row("acceptance", f"{profile.acceptance:.2f}")
    console().print(table)
