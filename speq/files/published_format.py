"""Published format of a checkpoint's weights: plain weights, or codes with scales."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from speq.errors import CheckpointError, UnsupportedError
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
# Ends of the names of INT4 codes and of what belongs to them, as compressed-tensors packs them.
PLAIN, PACKED, GROUP_SCALES = ".weight", ".weight_packed", ".weight_scale"
ZERO_POINTS, PACKED_SHAPE = ".weight_zero_point", ".weight_shape"
COLUMN_ORDER = ".weight_g_idx"
INT4_DTYPE, INT4_CODES, INT4_GROUP = torch.int32, 8, 32
COMPRESSED_TENSORS, PACK_QUANTIZED = "compressed-tensors", "pack-quantized"
FP8_BLOCK = [128, 128]
E4M3_NAMES = (None, "e4m3", "float8_e4m3fn")
ORIGINAL = "give the original 16- or 32-bit checkpoint, whose output is the one to reproduce"


# Quantisers' own config files, for some the only ones: ModelOpt, AutoGPTQ, AutoAWQ.
QUANTISERS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Fields of a config.json for quantization: those of transformers, compressed-tensors and MLX.
QUANTISED_FIELDS = ("quantization_config", "compression_config", "quantization")
# Fields of these that name a format or the bits of a code; the first match counts.
NAMING_FIELDS = ("quant_method", "quant_algo", "quant_type", "bits", "w_bit")


class Int4Groups(NamedTuple):
    """Groups of neighbours of INT4. zeros: whether each has a zero point of its own"""

    size: int
    zeros: bool


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
    found = next(iter(named.values()), WORDS)
    for file_name in QUANTISERS_FILES:
        method = _quantiser(where / file_name)
        if method is not None and method.lower() != found:
            raise UnsupportedError(
                f"{where} is quantised ({method}), as {file_name} says and config.json does not; "
                f"{ORIGINAL}"
            )
    return found


def _quantiser(path: Path) -> str | None:
    """Read the format that a quantiser's file names; None without the file, or if no weights are
    quantised.
    """
    if not path.exists():
        return None
    settings = read_json(path)
    inner = settings.get("quantization")
    settings = inner if isinstance(inner, dict) else settings
    if "quant_algo" in settings and settings["quant_algo"] is None:
        return None  # only the KV cache is quantised
    return _method(settings) or path.stem


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
    if field == QUANTISED_FIELDS[0] and method == COMPRESSED_TENSORS:
        _groups_of(settings, where)
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


def int4_groups(config: dict[str, Any], where: Path) -> Int4Groups | None:
    """Read the groups of a checkpoint in INT4; None for other formats. Raises SpeqError for groups
    that are not supported.
    """
    for part in (config, config.get("text_config")):
        settings = part.get(QUANTISED_FIELDS[0]) if isinstance(part, dict) else None
        if isinstance(settings, dict) and settings.get("quant_method") == COMPRESSED_TENSORS:
            return _groups_of(settings, where)
    return None


def _groups_of(settings: dict[str, Any], where: Path) -> Int4Groups:
    """Read compressed-tensors' settings. Raises SpeqError for what is not `pack-quantized`."""
    groups = settings.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    kinds = [each for each in groups.values() if isinstance(each, dict)]
    form, given = settings.get("format"), kinds[0].get("weights") if kinds else None
    if form != PACK_QUANTIZED or len(kinds) != 1 or not isinstance(given, dict):
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) in the format {form!r} with "
            f"{len(kinds)} groups of modules, and one group in {PACK_QUANTIZED!r} is read; "
            f"{ORIGINAL}"
        )
    size: Any = given.get("group_size")
    symmetric = given.get("symmetric", True)
    wanted = {
        "num_bits": (given.get("num_bits") == 4, 4),
        "type": (given.get("type", "int") == "int", "int"),
        "strategy": (given.get("strategy", "group") == "group", "group"),
        "actorder": (given.get("actorder") in (None, "static", "weight"), None),
        "group_size": (isinstance(size, int) and size > 0 and size % INT4_GROUP == 0, INT4_GROUP),
        "symmetric": (isinstance(symmetric, bool), True),
    }
    for name, (known, value) in wanted.items():
        if not known:
            raise UnsupportedError(
                f"{where} is quantised (compressed-tensors) with {name} {given.get(name)!r}, and "
                f"it is read with {value!r}"
                f"{' and multiples of it' if name == 'group_size' else ''}; {ORIGINAL}"
            )
    if kinds[0].get("input_activations") is not None:
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) with activations in fewer bits, and only "
            f"weights are; {ORIGINAL}"
        )
    return Int4Groups(size, not symmetric)


def words_name(name: str) -> str:
    """Name of the plain weights for a tensor of codes, or of what belongs to codes."""
    for ending in (PACKED, GROUP_SCALES, ZERO_POINTS, PACKED_SHAPE, COLUMN_ORDER):
        if name.endswith(ending):
            return name.removesuffix(ending) + PLAIN
    for ending in (SCALES, BLOCKS, BLOCK_SCALES):
        name = name.removesuffix(ending)
    return name


def scales_name(name: str) -> str:
    """Name of the scales of a tensor of codes."""
    if name.endswith(PACKED):
        return name.removesuffix(PACKED) + GROUP_SCALES
    if name.endswith(BLOCKS):
        return name.removesuffix(BLOCKS) + BLOCK_SCALES
    return name + SCALES


def zeros_name(name: str) -> str:
    """Name of the zero points of a tensor of INT4 codes."""
    return name.removesuffix(PACKED) + ZERO_POINTS


def beside_codes(name: str) -> tuple[str, ...]:
    """Names of the tensors that belong to a tensor of codes, of which some may be absent."""
    if name.endswith(PACKED):
        module = name.removesuffix(PACKED)
        return scales_name(name), zeros_name(name), module + PACKED_SHAPE, module + COLUMN_ORDER
    return (scales_name(name),)
