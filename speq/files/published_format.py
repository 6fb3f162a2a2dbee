"""Published format of a checkpoint's weights: plain weights, or codes with scales."""

from pathlib import Path
from typing import Any

import torch

from speq.errors import CheckpointError, UnsupportedError
from speq.files.int4_packing import PACKINGS
from speq.files.int4_settings import ORIGINAL, Int4Settings, read_settings
from speq.files.json_file import read_json

WORDS = "words"
FP8 = "fp8"
MXFP4 = "mxfp4"
INT4 = "int4"
# Quantized formats. Each has a codec of the same name.
FORMATS = (FP8, MXFP4, INT4)

# Meaning of exact for each format. Publishers' own kernels are no reference: they differ.
MEANINGS = {
    FP8: "weights are bfloat16 words, each the FP8 code times its block's scale, rounded once; "
    "activations are not quantised",
    MXFP4: "weights are bfloat16 words, each the MXFP4 code times its block's power of 2; "
    "activations are not quantised",
    INT4: "weights are bfloat16 words, each the INT4 code less its group's zero point, times its "
    "group's scale, rounded once",
}

FP8_DTYPE = torch.float8_e4m3fn
# Suffix of the scales of a tensor of FP8 codes.
SCALES = "_scale_inv"
# Suffixes of MXFP4 codes and their scales, after the name of the plain weights.
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
MXFP4_DTYPE, MXFP4_BLOCK, MXFP4_BLOCK_BYTES = torch.uint8, 32, 16
SCALE_DTYPES = (torch.float32, torch.bfloat16)
# End of the names of plain weights.
PLAIN = ".weight"
INT4_DTYPE = torch.int32
FP8_BLOCK = [128, 128]
E4M3_NAMES = (None, "e4m3", "float8_e4m3fn")

# Quantisers' own config files, for some the only ones: ModelOpt, AutoGPTQ, AutoAWQ.
QUANTISERS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Fields of a config.json for quantization: those of transformers, compressed-tensors and MLX.
QUANTISED_FIELDS = ("quantization_config", "compression_config", "quantization")
# Fields of these that name a format or the bits of a code; the first match counts.
NAMING_FIELDS = ("quant_method", "quant_algo", "quant_type", "bits", "w_bit")


def format_of(config: dict[str, Any], where: Path) -> str:
    """Determine the format: WORDS, or one of FORMATS. Raises SpeqError for an unsupported one, and
    if two places name different ones.

    config  a config.json; where: its folder, whose other files may also name a format
    """
    named = {
        field if part is config else f"text_config.{field}": _format_of(part[field], field, where)
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
        for field in QUANTISED_FIELDS
        if part.get(field) is not None
    }
    if len(set(named.values())) > 1:
        said = " and ".join(f"{field} ({name})" for field, name in named.items())
        raise CheckpointError(f"{where / 'config.json'} names two formats, in {said}; {ORIGINAL}")
    found, int4 = next(iter(named.values()), WORDS), int4_settings(config, where)
    for file_name in QUANTISERS_FILES:
        settings = _quantisers_settings(where / file_name)
        if settings is None or (int4 is not None and int4.agrees_with(settings)):
            continue
        method = _method(settings) or Path(file_name).stem
        if method.lower() != found:
            raise UnsupportedError(
                f"{where} is quantised ({method}), as {file_name} says and config.json does not; "
                f"{ORIGINAL}"
            )
    return found


def _quantisers_settings(path: Path) -> dict[str, Any] | None:
    """Read a quantiser's file; None without the file, or if no weights are quantised."""
    if not path.exists():
        return None
    settings = read_json(path)
    inner = settings.get("quantization")
    settings = inner if isinstance(inner, dict) else settings
    if "quant_algo" in settings and settings["quant_algo"] is None:
        return None  # only the KV cache is quantised
    return settings


def _method(settings: dict[str, Any]) -> str | None:
    for name in NAMING_FIELDS:
        value = settings.get(name)
        if value is not None:
            return f"{value} bits" if isinstance(value, int) else str(value)
    return None


def _format_of(settings: Any, field: str, where: Path) -> str:
    """Determine the format by one field, otherwise as `format_of`."""
    if not isinstance(settings, dict):
        raise UnsupportedError(f"{where} is quantised ({settings}); {ORIGINAL}")
    method = _method(settings)
    if field == QUANTISED_FIELDS[0] and read_settings(settings, where) is not None:
        return INT4
    if field != QUANTISED_FIELDS[0] or method not in (FP8, MXFP4):
        raise UnsupportedError(f"{where} is quantised ({method or field}); {ORIGINAL}")
    if method == MXFP4:
        return MXFP4
    wanted = {
        "weight_block_size": (settings.get("weight_block_size") == FP8_BLOCK, FP8_BLOCK),
        "fmt": (settings.get("fmt") in E4M3_NAMES, "e4m3"),
        "activation_scheme": (settings.get("activation_scheme") in (None, "dynamic"), "dynamic"),
    }
    for name, (known, value) in wanted.items():
        if not known:
            raise UnsupportedError(
                f"{where} is quantised (fp8) with {name} {settings.get(name)!r}, and fp8 is read "
                f"with {value!r}; {ORIGINAL}"
            )
    return FP8


def int4_settings(config: dict[str, Any], where: Path) -> Int4Settings | None:
    """Read how a checkpoint in INT4 is packed; None for other formats. Raises SpeqError for groups
    that are not supported.
    """
    for part in (config, config.get("text_config")):
        settings = part.get(QUANTISED_FIELDS[0]) if isinstance(part, dict) else None
        found = read_settings(settings, where) if isinstance(settings, dict) else None
        if found is not None:
            return found
    return None


def words_name(name: str) -> str:
    """Name of the plain weights for a tensor of codes, or of what belongs to codes."""
    for packing in PACKINGS:
        for ending in (packing.codes, packing.scales, packing.zeros, *packing.others):
            if name.endswith(ending):
                return name.removesuffix(ending) + PLAIN
    for ending in (SCALES, BLOCKS, BLOCK_SCALES):
        name = name.removesuffix(ending)
    return name


def scales_name(name: str) -> str:
    """Name of the scales of a tensor of codes; `Checkpoint.int4_names` has those of INT4."""
    if name.endswith(BLOCKS):
        return name.removesuffix(BLOCKS) + BLOCK_SCALES
    return name + SCALES
