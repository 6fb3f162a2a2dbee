"""Settings of quantising and packing. Nothing here imports torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.config import Draft
from speq.errors import OptionError
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, File, Number, Size, Switch, Whole
from speq.registries import CODECS

METHODS = ("gptq", "rtn")
# Order in which a matrix' columns are quantised, and which of them share a scale.
#   static      the most active first; groups are neighbours, whatever the order
#   activation  the most active first, and groups follow that order (desc_act)
#   given       in their own order, as in the paper
COLUMN_ORDERS = ("static", "activation", "given")
# Codes that GPTQ may choose for a weight.
#   free       the nearest to the compensated weight
#   decodable  the nearest of those that determine the exact BF16 word up to its low byte
CODES = ("free", "decodable")
BITS = 4
# -1: one group, all columns.
GROUP_SIZES = (16, 32, 64, 128, -1)
# With fewer tokens than this share of its inputs an expert is rounded: a Hessian of so few tokens
# is mostly noise, even if GPTQ, damped as below, is no worse than rounding for it.
MIN_TOKEN_SHARE = 1 / 16
# Rows per input from which a Hessian needs no further damping. Tokens of one text are much alike:
# with fewer than eight, more damping improved the bundled model's outputs on other text.
SETTLED_ROWS = 8


@dataclass(frozen=True, slots=True)
class QuantizeSettings(Options):
    """Settings that the result depends on, besides the model and the calibration text."""

    bits: Annotated[int, Option("Bits of a code: 4, and no other.", Whole(among=(BITS,)))] = BITS
    group_size: Annotated[
        int, Option("Inputs that share a scale; -1: all of them.", Whole(among=GROUP_SIZES))
    ] = 128
    method: Annotated[
        str,
        Option("gptq, or rtn: rounding to nearest, as the draft auto does.", Choice(METHODS)),
    ] = "gptq"
    column_order: Annotated[
        str,
        Option(
            "In which order columns are quantised: static (the most active first, in groups of "
            "neighbours), activation (groups follow the order too, desc_act, which loaders must "
            "undo) or given.",
            Choice(COLUMN_ORDERS),
        ),
    ] = "static"
    codes: Annotated[
        str,
        Option(
            "free, or decodable: only those that tell all of the exact bfloat16 word but its low "
            "byte; auto: decodable for a model in bfloat16, free for others.",
            Choice(("auto", *CODES)),
        ),
    ] = "auto"
    dense: Annotated[
        bool,
        Option(
            "Quantise attention, shared experts and dense MLPs as well, for drafts that run them "
            "on codes.",
            Switch(),
        ),
    ] = False
    damp: Annotated[
        float,
        Option(
            "Added to a Hessian's diagonal, as a share of its mean.",
            Number(1, without_minimum=True),
        ),
    ] = 0.01
    samples: Annotated[int, Option("Windows of text to calibrate on, at most.", Whole(1))] = 512
    sequence_length: Annotated[int, Option("Tokens of each window.", Whole(8))] = 512
    seed: Annotated[int, Option("Chooses windows of the text.", Whole(0, 2**63 - 1))] = 0

    @property
    def desc_act(self) -> bool:
        """True if the groups of a matrix are not of neighbouring inputs."""
        return self.method == "gptq" and self.column_order == "activation"

    def min_tokens(self, inputs: int) -> int:
        """Fewest tokens of an expert that is quantised, if its matrices have at most `inputs`
        columns.
        """
        return max(math.ceil(MIN_TOKEN_SHARE * inputs), 1)

    def damp_for(self, tokens: int, inputs: int) -> float:
        """Damping of a Hessian over `tokens` rows.

        A Hessian of few rows is overconfident in few directions: errors that it moves return on
        other text. So damping grows with the square of the rows missing from SETTLED_ROWS per
        input, until columns are only rounded.
        """
        return self.damp * max(1.0, SETTLED_ROWS * inputs / tokens) ** 2


@dataclass(frozen=True, slots=True)
class ConversionSettings(Options):
    """Calibration text, memory budget and output folder of quantising."""

    out: Annotated[
        Path | None,
        Option(
            "Folder to write: a GPTQ checkpoint; default: .speq/gptq in the model's own, where "
            "the draft auto finds it.",
            File("a folder"),
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        Option(
            "JSON Lines with a `prompt` or `text` in each row, or a text file; default: our own "
            "prompts, which are few.",
            File("a file of text", readable=True),
        ),
    ] = None
    memory_budget: Annotated[
        int | None,
        Option("Memory for all of it, such as 8GiB; default: 3/4 of what is free.", Size()),
    ] = None


@dataclass(frozen=True, slots=True)
class PackSettings(Options):
    """Codec, draft and output folder of packing."""

    out: Annotated[Path, Option("Folder to write; itself a model then.", File("a folder"))]
    codec: Annotated[
        str,
        Option(
            "How experts are written: raw, their own words; lossless: smaller, bit for bit the "
            "same; residual: smaller still, over a draft's codes and with that draft; auto is "
            "raw.",
            Choice(("auto",), CODECS),
        ),
    ] = "auto"
    draft: Draft = "auto"
    mirror: Annotated[
        Path | None,
        Option(
            "Folder on another disk that gets the experts too; runs read from both.",
            File("a folder"),
        ),
    ] = None
    stripe: Annotated[
        Path | None,
        Option(
            "Folder on another disk that gets a part of the experts, by how fast both disks read; "
            "runs need both.",
            File("a folder"),
        ),
    ] = None

    def check_together(self) -> None:
        """Raise SpeqError for experts that are to be divided and doubled."""
        if self.mirror is not None and self.stripe is not None:
            raise OptionError(
                "mirror and stripe are given together; a mirror holds all experts once more and a "
                "stripe holds a part of them: give one of them"
            )
