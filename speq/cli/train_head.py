"""`speq train-head`: a draft head for a model, trained on the model's own states of some texts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from speq.cli import options as opt
from speq.config import Model
from speq.training.settings import HeadSettings, TrainingSettings
from speq.units import format_bytes

if TYPE_CHECKING:
    from speq.training.train_head import TrainedHead


def train_head(
    model: Model,
    settings: HeadSettings,
    training: TrainingSettings,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Train a head that drafts out of the model's last hidden states (Jakiro).

    The model's own engine makes these states once, so the model may be larger than memory.
    Interrupted, it leaves a folder that no run opens; the same command goes on from there.
    """
    from speq.training.train_head import train

    with output.progress() as progress:
        made = train(model, settings, training, progress)
    show(model, made)
    for line in findings(made):
        output.note(line)


def show(model: str, made: "TrainedHead") -> None:
    """Acceptance by depth, as a table."""
    from rich.table import Table

    from speq.measure.console import console

    table = Table(title=f"train-head: {model}", box=None, pad_edge=False)
    for title in ("tokens", "depth", "tried", "stood", "share"):
        table.add_column(title, justify="right")
    for name, found in made.report["acceptance"].items():
        rows = zip(found["tried"], found["stood"], found["by_depth"], strict=True)
        for depth, (tried, stood, share) in enumerate(rows, start=1):
            table.add_row(name, str(depth), str(tried), str(stood), f"{share:.1%}")
    console().print(table)


def findings(made: "TrainedHead") -> Iterator[str]:
    """What the table does not say."""
    report = made.report
    for name, found in report["acceptance"].items():
        yield (
            f"{name}: {found['accept_length']:.2f} tokens a step, drafts of "
            f"{report['draft_length']}, {found['steps']} steps"
        )
    named = report["named_layers"]
    for layer in named:
        found, guess = report["routes"], report["routes"]["guessed"][layer]
        rival = "none" if guess is None else f"{guess:.1%}"
        yield (
            f"names experts of MoE layer {layer}: {found['drafted'][layer]:.1%} of those that are "
            f"used (its router a layer early: {rival})"
        )
    if not named and report["routes"] is not None:
        yield "names no experts: routers find more of them a layer early, in all layers"
    yield (
        f"trained on {report['tokens']} tokens, {report['steps']} steps, "
        f"{report['seconds'] / 60:.1f} minutes"
    )
    yield f"{made.folder}: {format_bytes(report['head_bytes'])}; more in report.json there"
