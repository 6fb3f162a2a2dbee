"""What a run measured, as tables on stderr."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from speq.governor.explanation import Explanation, ExplanationRow
from speq.measure.approximation import approximate
from speq.measure.console import console
from speq.units import format_bytes

Show = Callable[[Any], str]


def number(form: str) -> Show:
    return form.format


def mebibytes(size: float) -> str:
    return f"{size / (1 << 20):.1f}"


def milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:.1f}"


SUMMARY: tuple[tuple[str, str, Show], ...] = (
    ("tokens", "new_tokens", number("{}")),
    ("time per output token (TPOT)", "tpot_ms", number("{:.1f} ms")),
    ("time to first token (TTFT)", "ttft_ms", number("{:.0f} ms")),
    ("draft length, mean", "draft_length_mean", number("{:.2f}")),
    ("tokens per step", "accept_length_mean", number("{:.2f}")),
    ("acceptance rate", "acceptance_rate", number("{:.1%}")),
    ("expert prediction recall", "route_recall", number("{:.1%}")),
    ("expert hit rate", "hit_rate", number("{:.1%}")),
    ("moved per token", "moved_bytes_per_token", format_bytes),
    ("waited for experts", "stall_s", number("{:.2f} s")),
)
# Of runs whose drafts branch.
OF_TREES = (("branches, mean", "branches_mean"), ("given up, mean", "given_up_mean"))
# Of every layer and of the whole run, by column title.
LAYER: dict[str, tuple[str, Show]] = {
    "asked\nfor": ("requests", str),
    "hits": ("hits", str),
    "late": ("late", str),
    "demand\nMiB": ("demand_bytes", mebibytes),
    "ahead\nMiB": ("ahead_bytes", mebibytes),
    "used": ("used", str),
    "wasted": ("wasted", str),
    "rejected\nMiB": ("rejected_bytes", mebibytes),
    "stall\nms": ("stall_s", milliseconds),
    "of it\nlate": ("late_s", milliseconds),
}


def _shown(value: Any, show: Show) -> str:
    return "-" if value is None else show(value)


def print_approximation(stats: dict[str, Any]) -> None:
    """Say what an expert budget cost, if there was one; also where little else is said."""
    if stats["budget"] is not None:
        console(stderr=True).print(approximate(stats["budget"]), highlight=False)


def print_summary(stats: dict[str, Any]) -> None:
    """A short table of a run's figures."""
    memory = stats["memory"]
    table = Table(show_header=False)
    for title, name, show in SUMMARY:
        table.add_row(title, _shown(stats[name], show))
    for title, name in OF_TREES if stats["branches_mean"] else ():
        table.add_row(title, _shown(stats[name], number("{:.2f}")))
    if stats["side_steps"]:
        table.add_row("drafts by prompt lookup", f"{stats['side_steps']} of {stats['steps']} steps")
    experts = f"{memory['slots'] and format_bytes(memory['slots'])} of it expert slots"
    table.add_row("memory budget", f"{format_bytes(memory['budget'])}, {experts}")
    held = format_bytes(memory["non_expert_weights"])
    table.add_row("shared weights", f"{held}, {stats['dense']}")
    table.add_row("reader threads", str(stats["reader_threads"]))
    table.add_row("order of sums", stats["sums"])
    console(stderr=True).print(table)


def print_layers(stats: dict[str, Any]) -> None:
    """Sources of experts, layer by layer, and the hidden part of their transfers."""
    table = Table(title="experts while decoding, by layer", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("layer", *LAYER):
        table.add_column(title, justify="right")
    whole = stats | {"demand_bytes": stats["moved_bytes"] - stats["ahead_bytes"]}
    whole |= {name: sum(layer[name] for layer in stats["layers"]) for name in ("requests", "hits")}
    whole["late"] = sum(layer["late"] for layer in stats["layers"])
    for layer in stats["layers"]:
        cells = (_shown(layer[name], show) for name, show in LAYER.values())
        table.add_row(str(layer["layer"]), *cells)
    table.add_section()
    table.add_row("all", *(_shown(whole[name], show) for name, show in LAYER.values()))
    shown = console(stderr=True)
    shown.print(table)
    hidden = _shown(stats["hidden_share"], number("{:.1%}"))
    shown.print(
        f"transfers were under way for {stats['link_s']:.2f} s, {hidden} of it behind computation"
    )
    if stats["verified_bytes"]:
        shown.print(
            f"checksums of {format_bytes(stats['verified_bytes'])} were compared in "
            f"{stats['verified_s']:.2f} s of reader threads, each record's when it is first read"
        )


def drafts_of(choice: ExplanationRow) -> str:
    """Their length, and whether they branch or are another drafter's than the run's own."""
    if choice.drafter:
        return f"{choice.draft_length}, {choice.drafter}"
    return f"{choice.draft_length}, trees" if choice.branching else str(choice.draft_length)


def print_explanation(explanation: Explanation, planned: str | None) -> None:
    """Which draft lengths a run chose, on what grounds, and how well their times were known.

    planned  why the codec and the draft were chosen, where there was something to weigh
    """
    table = Table(title="draft lengths", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("k", "steps", "tokens", "ms/token", "on what grounds"):
        table.add_column(title, justify="left" if title.startswith("on") else "right")
    for choice in explanation.choices:
        grounds = ", ".join(f"{ground} {count}" for ground, count in choice.grounds.items())
        token_ms = _shown(choice.token_s, milliseconds)
        table.add_row(drafts_of(choice), str(choice.steps), str(choice.tokens), token_ms, grounds)
    shown = console(stderr=True)
    if planned is not None:
        shown.print(f"planned: {planned}", highlight=False)
    shown.print(table)
    for choice in explanation.choices:
        shown.print(f"k={drafts_of(choice)}, at last: {choice.reason}", highlight=False)
    if explanation.error is not None:
        share = number("{:.1%}")
        shown.print(
            "step times differed from what was expected by "
            f"{_shown(explanation.serial_error, share)} (transfers not hidden, Eq. 3), "
            f"{_shown(explanation.overlapped_error, share)} (hidden) and "
            f"{_shown(explanation.error, share)} (as measured) on average"
        )
