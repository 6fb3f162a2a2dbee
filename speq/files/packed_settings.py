"""Settings of checkpoints in INT4 and NVFP4: `quantization_config` of config.json, or ModelOpt's
own file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speq.errors import UnsupportedError
from speq.files.packing import (
    AWQ,
    COMPRESSED,
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    MODELOPT,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    CodePacking,
    Int4Groups,
)

# Kernels multiply groups of multiples of it.
INT4_GROUP = 32
# Size of groups that are all inputs.
WHOLE_ROW = -1
PACK_QUANTIZED = "pack-quantized"
NVFP4_PACKED, MXFP4_PACKED = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
# ModelOpt's names of what is read: of all layers, and of some where layers differ.
NVFP4_ALGORITHMS, MIXED = ("NVFP4", "W4A16_NVFP4"), "MIXED_PRECISION"
# What compressed-tensors calls groups of inputs in another order.
ORDERED = ("group", "dynamic")
ORIGINAL = "give the original 16- or 32-bit checkpoint, whose output is the one to reproduce"


class PackedSettings(NamedTuple):
    """How a checkpoint is packed.

    groups   of INT4, of which the dtype of scales is a guess; None for other formats
    ordered  whether a tensor says which input is of which group (act-order)
    """

    packing: CodePacking
    groups: Int4Groups | None = None
    ordered: bool = False

    @property
    def multiplied(self) -> bool:
        """True if kernels multiply such codes."""
        whole = self.groups is None or (self.groups.size > 0 and self.groups.size % INT4_GROUP == 0)
        return whole and not self.ordered

    def agrees_with(self, beside: dict[str, Any], where: Path) -> bool:
        """True unless a quantiser's own file beside config.json says otherwise."""
        if self.groups is None:
            return read_settings({"quant_method": "modelopt"} | beside, where) == self
        size = beside.get("group_size", beside.get("q_group_size", self.groups.size or WHOLE_ROW))
        method = beside.get("quant_method", beside.get("quant_algo", self.packing.name))
        return (
            beside.get("bits", beside.get("w_bit", 4)) == 4
            and size == (self.groups.size or WHOLE_ROW)
            and self.packing.name.startswith(str(method).lower())
            and bool(beside.get("desc_act", self.ordered)) == self.ordered
            and beside.get("checkpoint_format", self.packing.name) == self.packing.name
        )


class Wanted(NamedTuple):
    """A setting: whether it is one that is read, and what it would have to be."""

    known: bool
    value: object


def read_settings(settings: dict[str, Any], where: Path) -> PackedSettings | None:
    """Read a `quantization_config`; None if it is none of these formats. Raises SpeqError for what
    is not supported.
    """
    method = settings.get("quant_method")
    read = READERS.get(method) if isinstance(method, str) else None
    return None if read is None else read(settings, where)


def _compressed(settings: dict[str, Any], where: Path) -> PackedSettings:
    groups = settings.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    kinds = [each for each in groups.values() if isinstance(each, dict)]
    form, given = settings.get("format"), kinds[0].get("weights") if kinds else None
    known = form in (PACK_QUANTIZED, NVFP4_PACKED, MXFP4_PACKED)
    if not known or len(kinds) != 1 or not isinstance(given, dict):
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) in the format {form!r} with "
            f"{len(kinds)} groups of modules, and one group in {PACK_QUANTIZED!r}, "
            f"{NVFP4_PACKED!r} or {MXFP4_PACKED!r} is read; {ORIGINAL}"
        )
    if form == NVFP4_PACKED:
        _check_floats(COMPRESSED_TENSORS, given, where)
        return PackedSettings(COMPRESSED_NVFP4)
    if form == MXFP4_PACKED:
        _check_floats(COMPRESSED_TENSORS, given, where, MXFP4_BLOCK)
        return PackedSettings(COMPRESSED_MXFP4)
    symmetric, strategy = given.get("symmetric", True), given.get("strategy", "group")
    wanted = {
        "num_bits": Wanted(given.get("num_bits") == 4, 4),
        "type": Wanted(given.get("type", "int") == "int", "int"),
        "strategy": Wanted(strategy in ("group", "channel"), "group"),
        "actorder": Wanted(given.get("actorder") in (None, "static", "weight", *ORDERED), None),
        "symmetric": Wanted(isinstance(symmetric, bool), True),
    }
    by_row = {"group_size": WHOLE_ROW} if strategy == "channel" else {}
    size = _check_groups(COMPRESSED_TENSORS, given | by_row, wanted, where)
    if kinds[0].get("input_activations") is not None:
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) with activations in fewer bits, and only "
            f"weights are; {ORIGINAL}"
        )
    ordered = given.get("actorder") in ORDERED
    return PackedSettings(COMPRESSED, Int4Groups(size, not symmetric), ordered)


def _modelopt(settings: dict[str, Any], where: Path) -> PackedSettings:
    """Read ModelOpt's settings. Layers in FP8 have one scale for a matrix."""
    layers = settings.get("quantized_layers")
    layers = layers if isinstance(layers, dict) else {}
    said = settings.get("quant_algo")
    algorithms = {said}
    if said == MIXED:
        kinds = (each if isinstance(each, dict) else {} for each in layers.values())
        algorithms = {each.get("quant_algo") for each in kinds}
    unknown = algorithms - {*NVFP4_ALGORITHMS, "FP8"}
    if unknown or not algorithms & {*NVFP4_ALGORITHMS}:
        found = ", ".join(sorted(map(str, algorithms)))
        raise UnsupportedError(
            f"{where} is quantised (modelopt {said}: {found}), and NVFP4 is read, beside which "
            f"some layers may be in FP8; {ORIGINAL}"
        )
    groups = settings.get("config_groups")
    alike = groups.values() if said != MIXED and isinstance(groups, dict) else ()
    _check_floats("modelopt", settings, where)
    for weights in (each.get("weights") for each in alike if isinstance(each, dict)):
        _check_floats("modelopt", weights if isinstance(weights, dict) else {}, where)
    return PackedSettings(MODELOPT)


def _check_floats(
    method: str, given: dict[str, Any], where: Path, block: int = NVFP4_BLOCK
) -> None:
    """Raise SpeqError unless weights are codes of four bits in blocks of so many."""
    wanted = {
        "num_bits": Wanted(given.get("num_bits", 4) == 4, 4),
        "type": Wanted(given.get("type", "float") == "float", "float"),
        "group_size": Wanted(given.get("group_size", block) == block, block),
        "symmetric": Wanted(given.get("symmetric", True) is True, True),
    }
    check_settings(method, given, wanted, where)


def _gptq(settings: dict[str, Any], where: Path) -> PackedSettings:
    form = settings.get("checkpoint_format", settings.get("format")) or GPTQ.name
    if settings.get("is_marlin_format"):
        form = "marlin"
    modules = settings.get("dynamic") or {}
    left = isinstance(modules, dict) and all(name.startswith("-:") for name in modules)
    wanted = {
        "bits": Wanted(settings.get("bits") == 4, 4),
        "desc_act": Wanted(settings.get("desc_act") in (None, False, True), False),
        "checkpoint_format": Wanted(form in (GPTQ.name, GPTQ_V2.name), GPTQ.name),
        "pack_dtype": Wanted(settings.get("pack_dtype") in (None, "int32", "torch.int32"), "int32"),
        "rotation": Wanted(not settings.get("rotation"), None),
        "dynamic": Wanted(left, None),
    }
    size = _check_groups("gptq", settings | {"checkpoint_format": form}, wanted, where)
    # Symmetric checkpoints have zero points too, which are all the same.
    packing = GPTQ if form == GPTQ.name else GPTQ_V2
    groups = Int4Groups(size, zeros=True, halves=True)
    return PackedSettings(packing, groups, bool(settings.get("desc_act")))


def _awq(settings: dict[str, Any], where: Path) -> PackedSettings:
    form = settings.get("version", settings.get("format")) or "gemm"
    wanted = {
        "bits": Wanted(settings.get("bits", settings.get("w_bit")) == 4, 4),
        "zero_point": Wanted(settings.get("zero_point", True) is True, True),
        "version": Wanted(str(form).lower() == "gemm", "gemm"),
    }
    size = settings.get("group_size", settings.get("q_group_size"))
    given = settings | {"version": form, "group_size": size}
    size = _check_groups("awq", given, wanted, where)
    return PackedSettings(AWQ, Int4Groups(size, zeros=True, halves=True))


READERS: dict[str, Callable[[dict[str, Any], Path], PackedSettings]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}


def _check_groups(
    method: str, given: dict[str, Any], wanted: dict[str, Wanted], where: Path
) -> int:
    """Raise SpeqError for a setting that is not read. Return the size of groups; 0: all inputs."""
    size: Any = given.get("group_size")
    known = type(size) is int and (size > 0 or size == WHOLE_ROW)
    of_size = Wanted(known, f"a number of inputs, or {WHOLE_ROW} for all")
    check_settings(method, given, wanted | {"group_size": of_size}, where)
    return max(int(size), 0)


def check_settings(
    method: str, given: dict[str, Any], wanted: dict[str, Wanted], where: Path
) -> None:
    """Raise SpeqError for a setting that is not read."""
    for name, (known, value) in wanted.items():
        if not known:
            raise UnsupportedError(
                f"{where} is quantised ({method}) with {name} {given.get(name)!r}, and it is read "
                f"with {value if name == 'group_size' else repr(value)}; {ORIGINAL}"
            )
