"""Published format of a checkpoint's weights: plain weights, or codes with scales."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from speq.errors import CheckpointError, UnsupportedError
from speq.files.fp8_settings import BARE_SCALE, INVERSE, PLAIN_SCALE, Fp8Settings, read_fp8
from speq.files.json_file import read_json
from speq.files.packed_settings import ORIGINAL, PackedSettings, read_settings
from speq.files.packing import DEEPSEEK, INT4, MXFP4, NVFP4, PACKINGS

WORDS = "words"
FP8 = "fp8"
# Quantized formats. Each has a codec of the same name.
FORMATS = (FP8, MXFP4, INT4, NVFP4)

# Meaning of exact for each format. Publishers' own kernels are no reference: they differ.
MEANINGS = {
    FP8: "weights are bfloat16 words, each the FP8 code times its scale, rounded once; "
    "activations are not quantised",
    MXFP4: "weights are bfloat16 words, each the MXFP4 code times its block's power of 2; "
    "activations are not quantised",
    INT4: "weights are bfloat16 words, each the INT4 code less its group's zero point, times its "
    "group's scale, rounded once",
    NVFP4: "weights are bfloat16 words, each the NVFP4 code times its scale, that of its block by "
    "that of its matrix in float32, rounded once; activations and the KV cache are not quantised",
}

# What `PublishedFormat.decoded` costs.
DECODED = (
    "no kernel multiplies these codes: experts are decoded to bfloat16 words as they are read, and "
    "take as much memory as 16-bit ones; `speq pack --codec lossless` writes them decoded"
)

FP8_DTYPE = torch.float8_e4m3fn
# Suffixes of MXFP4 codes and their scales, after the name of the plain weights.
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
MXFP4_DTYPE, MXFP4_BLOCK_BYTES = torch.uint8, 16
# The last are powers of 2 (UE8M0).
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
# End of the names of plain weights.
PLAIN = ".weight"
INT4_DTYPE = torch.int32
# Ends of the names of scales of a KV cache in fewer bits.
KV_SCALES = (".k_scale", ".v_scale")

# Quantisers' own config files, for some the only ones: ModelOpt, AutoGPTQ, AutoAWQ.
QUANTISERS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Fields of a config.json for quantization: those of transformers, compressed-tensors and MLX.
QUANTISED_FIELDS = ("quantization_config", "compression_config", "quantization")
# Fields of these that name a format or the bits of a code; the first match counts.
NAMING_FIELDS = ("quant_method", "quant_algo", "quant_type", "bits", "w_bit")


class PublishedFormat(NamedTuple):
    """How a checkpoint's weights are published.

    name    WORDS, or one of FORMATS
    packed  how INT4 and NVFP4 are packed; None for other formats
    fp8     what shares a scale in FP8
    """

    name: str = WORDS
    packed: PackedSettings | None = None
    fp8: Fp8Settings = Fp8Settings()

    @property
    def decoded(self) -> bool:
        """True for codes that no kernel multiplies. Experts are decoded to bfloat16 words as they
        are read, and held as words.
        """
        if self.packed is not None:
            return not self.packed.multiplied
        return self.name == FP8 and not self.fp8.blocks.multiplied

    @property
    def held(self) -> str:
        """Format of experts in slots."""
        return WORDS if self.decoded else self.name


def format_of(config: dict[str, Any], where: Path) -> PublishedFormat:
    """Determine the format. Raises SpeqError for an unsupported one, and if two places name
    different ones.

    config  a config.json; where: its folder, whose other files may also name a format
    """
    named = {
        field if part is config else f"text_config.{field}": _format_of(
            part[field], field, where, part
        )
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
        for field in QUANTISED_FIELDS
        if part.get(field) is not None
    }
    if len({each.name for each in named.values()}) > 1:
        both = " and ".join(f"{field} ({each.name})" for field, each in named.items())
        raise CheckpointError(f"{where / 'config.json'} names two formats, in {both}; {ORIGINAL}")
    beside = {name: _quantisers_settings(where / name) for name in QUANTISERS_FILES}
    of_modelopt = beside[QUANTISERS_FILES[0]]
    if not named and of_modelopt is not None:  # earlier versions wrote nothing into config.json
        said = {"quant_method": "modelopt"} | of_modelopt
        named[QUANTISERS_FILES[0]] = _format_of(said, QUANTISED_FIELDS[0], where)
    found = next(iter(named.values()), PublishedFormat())
    for file_name, settings in beside.items():
        if settings is None or (found.packed and found.packed.agrees_with(settings, where)):
            continue
        method = _method(settings) or Path(file_name).stem
        if method.lower() != found.name:
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


def _format_of(
    settings: Any, field: str, where: Path, config: dict[str, Any] | None = None
) -> PublishedFormat:
    """Determine the format by one field of a configuration, otherwise as `format_of`."""
    if not isinstance(settings, dict):
        raise UnsupportedError(f"{where} is quantised ({settings}); {ORIGINAL}")
    method = _method(settings)
    if field == QUANTISED_FIELDS[0]:
        if method == MXFP4:
            return PublishedFormat(MXFP4)
        fp8 = read_fp8(settings, where)
        if fp8 is not None:
            config = config or {}
            experts = settings.get("expert_dtype", config.get("expert_dtype"))
            if config.get("model_type") == "deepseek_v4" and fp8.scales == INVERSE:
                fp8 = fp8._replace(scales=BARE_SCALE)
            return _with_experts(fp8, experts, settings.get("moe_quant_algo"), where)
        packed = read_settings(settings, where)
        if packed is not None:
            return PublishedFormat(packed.packing.format, packed)
    raise UnsupportedError(f"{where} is quantised ({method or field}); {ORIGINAL}")


def _with_experts(fp8: Fp8Settings, dtype: Any, algorithm: Any, where: Path) -> PublishedFormat:
    """Format of a checkpoint in FP8 whose experts may be in fewer bits, as DeepSeek-V4's.

    dtype, algorithm  what config.json says of experts alone; None: nothing
    """
    if algorithm is not None or dtype not in (None, "fp8", "fp4"):
        raise UnsupportedError(
            f"{where} is quantised (fp8) with experts in {algorithm or dtype}, and beside FP8 only "
            f"experts in fp4, blocks of 32 with a power of 2 each, are read; {ORIGINAL}"
        )
    if dtype == "fp4":
        return PublishedFormat(MXFP4, PackedSettings(DEEPSEEK), fp8)
    return PublishedFormat(FP8, fp8=fp8)


def words_name(name: str) -> str:
    """Name of the plain weights for a tensor of codes, or of what belongs to codes."""
    for packing in PACKINGS:
        for ending in (packing.codes, packing.scales, packing.third, *packing.others):
            if name.endswith(ending):
                return name.removesuffix(ending) + PLAIN
    for ending in (INVERSE, PLAIN_SCALE, BLOCKS, BLOCK_SCALES):
        name = name.removesuffix(ending)
    return name
