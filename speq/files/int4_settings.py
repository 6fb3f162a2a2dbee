"""`quantization_config` of checkpoints in INT4, read and checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speq.errors import UnsupportedError
from speq.files.int4_packing import AWQ, COMPRESSED, GPTQ, GPTQ_V2, Int4Groups, Int4Packing

# Sizes of groups are multiples of it.
INT4_GROUP = 32
PACK_QUANTIZED = "pack-quantized"
ORIGINAL = "give the original 16- or 32-bit checkpoint, whose output is the one to reproduce"


class Int4Settings(NamedTuple):
    """How a checkpoint is packed, and its groups; the dtype of scales is that of a first guess."""

    packing: Int4Packing
    groups: Int4Groups

    def agrees_with(self, beside: dict[str, Any]) -> bool:
        """True unless a quantiser's own file beside config.json says otherwise."""
        size = beside.get("group_size", beside.get("q_group_size", self.groups.size))
        method = beside.get("quant_method", beside.get("quant_algo", self.packing.name))
        return (
            beside.get("bits", beside.get("w_bit", 4)) == 4
            and size == self.groups.size
            and self.packing.name.startswith(str(method).lower())
            and not beside.get("desc_act")
            and beside.get("checkpoint_format", self.packing.name) == self.packing.name
        )


class Wanted(NamedTuple):
    """A setting: whether it is one that is read, and what it would have to be."""

    known: bool
    value: object


def read_settings(settings: dict[str, Any], where: Path) -> Int4Settings | None:
    """Read a `quantization_config`; None if it is none of INT4. Raises SpeqError for what is not
    supported.
    """
    method = settings.get("quant_method")
    read = READERS.get(method) if isinstance(method, str) else None
    return None if read is None else read(settings, where)


def _compressed(settings: dict[str, Any], where: Path) -> Int4Settings:
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
    symmetric = given.get("symmetric", True)
    wanted = {
        "num_bits": Wanted(given.get("num_bits") == 4, 4),
        "type": Wanted(given.get("type", "int") == "int", "int"),
        "strategy": Wanted(given.get("strategy", "group") == "group", "group"),
        "actorder": Wanted(given.get("actorder") in (None, "static", "weight"), None),
        "symmetric": Wanted(isinstance(symmetric, bool), True),
    }
    size = _check("compressed-tensors", given, wanted, where)
    if kinds[0].get("input_activations") is not None:
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) with activations in fewer bits, and only "
            f"weights are; {ORIGINAL}"
        )
    return Int4Settings(COMPRESSED, Int4Groups(size, not symmetric))


def _gptq(settings: dict[str, Any], where: Path) -> Int4Settings:
    form = settings.get("checkpoint_format", settings.get("format")) or GPTQ.name
    if settings.get("is_marlin_format"):
        form = "marlin"
    modules = settings.get("dynamic") or {}
    left = isinstance(modules, dict) and all(name.startswith("-:") for name in modules)
    wanted = {
        "bits": Wanted(settings.get("bits") == 4, 4),
        "desc_act": Wanted(settings.get("desc_act") in (None, False), False),
        "checkpoint_format": Wanted(form in (GPTQ.name, GPTQ_V2.name), GPTQ.name),
        "pack_dtype": Wanted(settings.get("pack_dtype") in (None, "int32", "torch.int32"), "int32"),
        "rotation": Wanted(not settings.get("rotation"), None),
        "dynamic": Wanted(left, None),
    }
    size = _check("gptq", settings | {"checkpoint_format": form}, wanted, where)
    # Symmetric checkpoints have zero points too, which are all the same.
    packing = GPTQ if form == GPTQ.name else GPTQ_V2
    return Int4Settings(packing, Int4Groups(size, zeros=True, halves=True))


def _awq(settings: dict[str, Any], where: Path) -> Int4Settings:
    form = settings.get("version", settings.get("format")) or "gemm"
    wanted = {
        "bits": Wanted(settings.get("bits", settings.get("w_bit")) == 4, 4),
        "zero_point": Wanted(settings.get("zero_point", True) is True, True),
        "version": Wanted(str(form).lower() == "gemm", "gemm"),
    }
    size = settings.get("group_size", settings.get("q_group_size"))
    given = settings | {"version": form, "group_size": size}
    size = _check("awq", given, wanted, where)
    return Int4Settings(AWQ, Int4Groups(size, zeros=True, halves=True))


READERS: dict[str, Callable[[dict[str, Any], Path], Int4Settings]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}


def _check(method: str, given: dict[str, Any], wanted: dict[str, Wanted], where: Path) -> int:
    """Raise SpeqError for a setting that is not read. Return the size of groups."""
    size: Any = given.get("group_size")
    whole = type(size) is int and size > 0 and size % INT4_GROUP == 0
    for name, (known, value) in (wanted | {"group_size": Wanted(whole, INT4_GROUP)}).items():
        if not known:
            raise UnsupportedError(
                f"{where} is quantised ({method}) with {name} {given.get(name)!r}, and it is read "
                f"with {value!r}{' and multiples of it' if name == 'group_size' else ''}; "
                f"{ORIGINAL}"
            )
    return int(size)
