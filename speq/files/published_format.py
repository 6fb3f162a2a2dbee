"""What a checkpoint's weights are published as, by its config.json: words, or codes with scales."""

from pathlib import Path
from typing import Any

import torch

from speq.errors import SpeqError

WORDS = "words"
FP8 = "fp8"
MXFP4 = "mxfp4"
# Formats of fewer bits than words have. Each has a codec of the same name.
FORMATS = (FP8, MXFP4)

# What a run of each means by exact. Publishers' own kernels are no reference: they differ.
MEANINGS = {
    FP8: "weights are bfloat16 words, each the FP8 code times its block's scale, rounded once; "
    "activations are not quantised",
    MXFP4: "weights are bfloat16 words, each the MXFP4 code times its block's power of 2; "
    "activations are not quantised",
}

FP8_DTYPE = torch.float8_e4m3fn
# The scales of a tensor of FP8 codes lie under its name with this behind it.
SCALES = "_scale_inv"
# Codes of MXFP4 and their scales, behind the name that words would have.
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
MXFP4_DTYPE, MXFP4_BLOCK, MXFP4_BLOCK_BYTES = torch.uint8, 32, 16
SCALE_DTYPES = (torch.float32, torch.bfloat16)
FP8_BLOCK = [128, 128]
E4M3_NAMES = (None, "e4m3", "float8_e4m3fn")
ORIGINAL = "give the original 16- or 32-bit checkpoint, whose output is the one to reproduce"


def format_of(config: dict[str, Any], where: Path) -> str:
    """WORDS, or one of FORMATS. Raises SpeqError, naming it, for what is not read.

    config  a config.json; where: the folder it lies in
    """
    settings = config.get("quantization_config")
    if settings is None:
        return WORDS
    if not isinstance(settings, dict):
        raise SpeqError(f"{where} is quantised ({settings}); {ORIGINAL}")
    method = settings.get("quant_method")
    if method == MXFP4:
        return MXFP4
    if method != FP8:
        raise SpeqError(f"{where} is quantised ({method}); {ORIGINAL}")
    wanted = {
        "weight_block_size": (settings.get("weight_block_size") == FP8_BLOCK, FP8_BLOCK),
        "fmt": (settings.get("fmt") in E4M3_NAMES, "e4m3"),
        "activation_scheme": (settings.get("activation_scheme") in (None, "dynamic"), "dynamic"),
    }
    for name, (known, value) in wanted.items():
        if not known:
            raise SpeqError(
                f"{where} is quantised (fp8) with {name} {settings.get(name)!r}, and fp8 is read "
                f"with {value!r}; {ORIGINAL}"
            )
    return FP8


def words_name(name: str) -> str:
    """The name that a tensor of codes, or of scales, would have as words."""
    for ending in (SCALES, BLOCKS, BLOCK_SCALES):
        name = name.removesuffix(ending)
    return name


def scales_name(name: str) -> str:
    """The name of the scales of a tensor of codes."""
    if name.endswith(BLOCKS):
        return name.removesuffix(BLOCKS) + BLOCK_SCALES
    return name + SCALES
