"""Checks that the format and the requested codes can hold a model's experts."""

import torch

from speq.errors import OptionError
from speq.experts.int4 import group_columns
from speq.models.dense_parts import DenseShape
from speq.quantizing.settings import GROUP_SIZES, QuantizeSettings


def codes_for(dtype: torch.dtype) -> str:
    """Resolve codes auto for a checkpoint of experts in `dtype`."""
    return "decodable" if dtype == torch.bfloat16 else "free"


def check_dtype(settings: QuantizeSettings, dtype: torch.dtype) -> None:
    """Raise SpeqError for decodable codes of a checkpoint that is not in bfloat16."""
    if settings.codes == "decodable" and dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise OptionError(
            f"codes decodable is for checkpoints in bfloat16 and this one is in {found}; quantise "
            "with codes free"
        )


def fits(settings: QuantizeSettings, shape: DenseShape) -> bool:
    """True if the format can hold a dense layer."""
    group_size = group_columns(settings.group_size, shape.columns)
    return not (shape.columns % 8 or shape.outputs % 8 or shape.columns % group_size)


def check_sizes(settings: QuantizeSettings, hidden_size: int, expert_width: int) -> None:
    """Raise SpeqError if the format cannot hold experts of these dimensions."""
    for name, size in (("hidden size", hidden_size), ("expert width", expert_width)):
        if size % 8:
            raise OptionError(
                f"the model's {name} is {size}; a GPTQ checkpoint packs eight codes to a word and "
                "needs a multiple of 8"
            )
    group = settings.group_size

    def holds(group: int) -> bool:
        return not any(size % group_columns(group, size) for size in (hidden_size, expert_width))

    if not holds(group):
        fit = [size for size in GROUP_SIZES if holds(size)]
        raise OptionError(
            f"group size {group} does not divide both the hidden size {hidden_size} and the expert "
            f"width {expert_width}; give --group-size {' or '.join(map(str, fit))}"
        )
