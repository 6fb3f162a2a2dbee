"""How experts are quantised, checked where it enters."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speq.errors import SpeqError, checked_choice, checked_int
from speq.experts.int4 import whole_groups

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
class QuantizeSettings:
    """All that the result depends on beside the model and the calibration text.

    group_size       inputs that share a scale; -1: all of them
    damp             share of the mean of a Hessian's diagonal that is added to it
    samples          windows of `sequence_length` tokens to calibrate on, at most
    seed             chooses them among those the text has
    """

    bits: int = BITS
    group_size: int = 128
    method: str = "gptq"
    column_order: str = "static"
    codes: str = "free"
    damp: float = 0.01
    samples: int = 512
    sequence_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if checked_int("bits", self.bits, 1) != BITS:
            raise SpeqError(f"bits is {self.bits}; drafts have {BITS}: give that or nothing")
        if self.group_size not in GROUP_SIZES:
            raise SpeqError(
                f"group_size is {self.group_size!r}; it must be one of "
                f"{', '.join(map(str, GROUP_SIZES))}"
            )
        checked_choice("method", self.method, METHODS)
        checked_choice("column_order", self.column_order, COLUMN_ORDERS)
        checked_choice("codes", self.codes, CODES)
        if not isinstance(self.damp, float | int) or not 0 < self.damp <= 1:
            raise SpeqError(f"damp is {self.damp}; it must be above 0 and at most 1, such as 0.01")
        checked_int("samples", self.samples, 1)
        checked_int("sequence_length", self.sequence_length, 8)
        checked_int("seed", self.seed, 0, 2**63 - 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def desc_act(self) -> bool:
        """Whether the groups of a matrix are of other inputs than its neighbours."""
        return self.method == "gptq" and self.column_order == "activation"

    def group_of(self, inputs: int) -> int:
        """Inputs that share a scale, of a matrix with so many."""
        return whole_groups(self.group_size, inputs)

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


def codes_for(dtype: torch.dtype) -> str:
    """The codes to choose from where nobody said, for a checkpoint of experts in `dtype`."""
    return "decodable" if dtype == torch.bfloat16 else "free"


def check_dtype(settings: QuantizeSettings, dtype: torch.dtype) -> None:
    """Raise SpeqError where codes are to tell words that the checkpoint does not hold."""
    if settings.codes == "decodable" and dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise SpeqError(
            f"codes decodable is for checkpoints in bfloat16 and this one is in {found}; quantise "
            "with codes free"
        )


def check_sizes(settings: QuantizeSettings, hidden_size: int, expert_width: int) -> None:
    """Raise SpeqError where the format cannot hold experts of these dimensions."""
    for name, size in (("hidden size", hidden_size), ("expert width", expert_width)):
        if size % 8:
            raise SpeqError(
                f"the model's {name} is {size}; a GPTQ checkpoint packs eight codes to a word and "
                "needs a multiple of 8"
            )
    group = settings.group_size

    def fits(group: int) -> bool:
        return not any(size % whole_groups(group, size) for size in (hidden_size, expert_width))

    if not fits(group):
        fit = [size for size in GROUP_SIZES if fits(size)]
        raise SpeqError(
            f"group size {group} does not divide both the hidden size {hidden_size} and the expert "
            f"width {expert_width}; give --group-size {' or '.join(map(str, fit))}"
        )
