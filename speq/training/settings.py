"""Options of training a head. The command line reads them, so nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.config import Device
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, File, Number, Size, Whole

MAX_MINUTES = 60.0 * 24 * 30


@dataclass(frozen=True, slots=True)
class HeadSettings(Options):
    """Settings that the head depends on, besides the model, the texts and the number of steps."""

    width: Annotated[
        int | None,
        Option("Width of each branch's MLP; default: the model's hidden size.", Whole(1)),
    ] = None
    branches: Annotated[int, Option("MLPs side by side.", Whole(among=(1, 2)))] = 2
    contrast: Annotated[
        str,
        Option(
            "Whether the branches' contrast drafts the token after the next, without a pass of its "
            "own: on or off; auto: on with two branches.",
            Choice(("auto", "on", "off")),
        ),
    ] = "auto"
    sequence_length: Annotated[
        int,
        Option("Tokens of a window of text, and how far the head looks back.", Whole(8)),
    ] = 512
    batch_size: Annotated[int, Option("Windows in a step.", Whole(1))] = 4
    token_share: Annotated[
        float,
        Option(
            "Share of a window's positions whose tokens are trained on, other ones in each step. "
            "Features are at all positions. Tokens cost most of a step.",
            Number(1, without_minimum=True),
        ),
    ] = 0.25
    routes: Annotated[
        str,
        Option(
            "Whether the head names experts too, in layers where it finds more of them than the "
            "layer's own router does a layer early: on or off.",
            Choice(("on", "off")),
        ),
    ] = "on"
    learning_rate: Annotated[
        float, Option("The highest, of a cosine schedule.", Number(1, without_minimum=True))
    ] = 1e-3
    seed: Annotated[
        int, Option("Of the first weights, the texts' order and the noise.", Whole(0, 2**62))
    ] = 0

    @property
    def contrasts(self) -> bool:
        return self.contrast == "on" or (self.contrast == "auto" and self.branches == 2)


@dataclass(frozen=True, slots=True)
class TrainingSettings(Options):
    """Texts of a training, its duration, and its output folder."""

    texts: Annotated[Path, Option("Folder of text files (.txt), all of them.", File("a folder"))]
    minutes: Annotated[
        float,
        Option(
            "Time for all of it, about: features take a quarter, and steps what is left.",
            Number(MAX_MINUTES, without_minimum=True, unit="minutes"),
        ),
    ] = 20.0
    windows: Annotated[
        int | None,
        Option("Windows of text to train on; default: as many as the minutes allow.", Whole(1)),
    ] = None
    steps: Annotated[
        int | None, Option("Steps to train; default: as many as the minutes allow.", Whole(1))
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "Folder to write; default: .speq/head in the model's own, where drafter head finds it.",
            File("a folder"),
        ),
    ] = None
    memory_budget: Annotated[
        int | None,
        Option(
            "Memory for the model while features are made, such as 8GiB; default: half of what is "
            "free.",
            Size(),
        ),
    ] = None
    device: Device = "auto"
