"""How experts are written anew: quantised, or packed. Nothing here needs torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.config import Draft
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, File, Number, Size, Switch, Whole
from speq.registries import CODECS

METHODS = ("gptq", "rtn")
# In which order a matrix' columns are quantised, and which of them share a scale.
#   static      the most active first; groups are of neighbours, as if there were no order
#   activation  the most active first, and groups follow that order (desc_act)
#   given       as they come, as in the paper
COLUMN_ORDERS = ("static", "activation", "given")
# Which codes GPTQ may choose for a weight.
#   free       the nearest to what makes good for the columns before
#   decodable  of those that tell the exact BF16 word but for its low byte, the nearest to it
CODES = ("free", "decodable")
BITS = 4
# -1: one group, all columns.
GROUP_SIZES = (16, 32, 64, 128, -1)
# With fewer tokens than this share of its inputs an expert is rounded: what so few tokens say of
# the inputs is mostly chance, even where GPTQ, damped as below, is no worse than rounding for it.
MIN_TOKEN_SHARE = 1 / 16
# Rows for each input from which a Hessian is taken as it is. Tokens of one text are much alike:
# with fewer than eight, more damping made the bundled model's outputs on other text better.
SETTLED_ROWS = 8


@dataclass(frozen=True, slots=True)
class QuantizeSettings(Options):
    """All that the result depends on beside the model and the calibration text."""

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
        """Whether the groups of a matrix are of other inputs than its neighbours."""
        return self.method == "gptq" and self.column_order == "activation"

    def min_tokens(self, inputs: int) -> int:
        """Tokens an expert, whose matrices have at most `inputs` columns, must have seen."""
        return max(math.ceil(MIN_TOKEN_SHARE * inputs), 1)

    def damp_for(self, tokens: int, inputs: int) -> float:
        """Damping of a Hessian that sums over `tokens` rows.

        A Hessian of few rows knows few directions and is sure of them: the errors it moves about
        come back on other text. So damping grows, by the square, with what is missing from
        SETTLED_ROWS for each input, and ends where columns are only rounded.
        """
        return self.damp * max(1.0, SETTLED_ROWS * inputs / tokens) ** 2


@dataclass(frozen=True, slots=True)
class ConversionSettings(Options):
    """Which text a model is quantised by, in how much memory, and where the result goes."""

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
    """What a model's experts become, and where."""

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
