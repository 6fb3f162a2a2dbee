"""The packing of a GPTQ folder: `quantization_config`, read and checked.

It is in config.json (transformers, optimum, GPTQModel) or in quantize_config.json (AutoGPTQ), or in
both.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.drafts.gptq_format import FORMATS
from speq.errors import CheckpointError, UnsupportedError
from speq.experts.int4 import group_columns
from speq.files.json_file import read_json

CONFIG = "config.json"
QUANTIZE_CONFIG = "quantize_config.json"
KEY = "quantization_config"
# If two files, or two names of one setting, disagree, the packing is ambiguous.
SETTINGS = ("quant_method", "checkpoint_format", "bits", "group_size", "desc_act", "sym")
ALIASES = {"method": "quant_method", "format": "checkpoint_format"}
# Remedy for a sound draft of another model.
OF_THIS_MODEL = "give a draft of this very checkpoint"
REMEDY = "give a 4-bit, symmetric checkpoint of the format gptq or gptq_v2"


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """Packing of a checkpoint's linear layers.

    group_size         inputs per scale, at most a whole row; -1: a whole row
    desc_act           whether g_idx assigns inputs to groups
    sym                whether all zero points are 8; None: not given
    checkpoint_format  storage of zero points; see gptq_format
    """

    group_size: int
    desc_act: bool
    sym: bool | None
    checkpoint_format: str

    def group_size_for(self, columns: int) -> int:
        """Inputs per scale of a layer of `columns` inputs."""
        return group_columns(self.group_size, columns)


def has_gptq_config(path: Path, config: dict[str, Any]) -> bool:
    """True if a folder with this config.json is quantised by any method."""
    return config.get(KEY) is not None or os.path.exists(path / QUANTIZE_CONFIG)


def gptq_config(path: Path, config: dict[str, Any]) -> GptqConfig:
    """Read the packing of the folder `path`, whose config.json is `config`.

    Raises SpeqError, naming the setting, for contradictions and unsupported values.
    """
    said: dict[str, tuple[Any, str]] = {}
    for where, settings in _sources(path, config).items():
        for name, value in settings.items():
            setting = ALIASES.get(name, name)
            if setting not in (*SETTINGS, "pack_dtype", "is_marlin_format", "rotation"):
                continue
            known, first = said.setdefault(setting, (value, where))
            if known != value or type(known) is not type(value):
                raise CheckpointError(
                    f"{path} contradicts itself: {first} says {setting} {known!r} and {where} says "
                    f"{value!r}; download it again, or give another draft"
                )
    values = {name: value for name, (value, _) in said.items()}
    _check_method(path, values)
    return GptqConfig(
        group_size=_group_size(path, values),
        desc_act=_flag(path, values, "desc_act"),
        sym=_flag(path, values, "sym") if "sym" in values else None,
        checkpoint_format=values.get("checkpoint_format", FORMATS[0]),
    )


def _sources(path: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Objects with settings, by location."""
    found: dict[str, Any] = {}
    if config.get(KEY) is not None:
        found[f"{KEY} of {CONFIG}"] = config[KEY]
    if os.path.exists(path / QUANTIZE_CONFIG):
        found[QUANTIZE_CONFIG] = read_json(path / QUANTIZE_CONFIG)
    for where, settings in found.items():
        if not isinstance(settings, dict):
            raise CheckpointError(
                f"{path}: {where} is a JSON {type(settings).__name__}; it must be an object"
            )
    return found


def _check_method(path: Path, values: dict[str, Any]) -> None:
    method = values.get("quant_method", "gptq")
    if method != "gptq":
        raise UnsupportedError(
            f"{path} is quantised by {method!r}, which is not read here; {REMEDY}"
        )
    checkpoint_format = values.get("checkpoint_format", FORMATS[0])
    if values.get("is_marlin_format"):
        checkpoint_format = "marlin"
    if checkpoint_format not in FORMATS:
        raise UnsupportedError(
            f"{path} has the checkpoint_format {checkpoint_format!r}, which is not read here; "
            f"{REMEDY}"
        )
    bits = values.get("bits")
    if type(bits) is not int or bits != 4:
        raise UnsupportedError(f"{path} has bits {bits!r}, and only 4 are read here; {REMEDY}")
    if values.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise UnsupportedError(
            f"{path} has pack_dtype {values['pack_dtype']!r}, and only int32 is read here; {REMEDY}"
        )
    if values.get("rotation"):
        raise CheckpointError(
            f"{path} has rotated weights (rotation {values['rotation']!r}), which do not go with "
            f"the model's own routers; {REMEDY} without rotation"
        )


def _group_size(path: Path, values: dict[str, Any]) -> int:
    size = values.get("group_size")
    if type(size) is not int or (size != -1 and (size < 2 or size % 2)):
        raise CheckpointError(
            f"{path} has group_size {size!r}; it must be -1, for all of a row, or a positive even "
            "number"
        )
    return size


def _flag(path: Path, values: dict[str, Any], name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path} has {name} {value!r}; it must be true or false")
    return value
