"""Settings of checkpoints in FP8: `quantization_config` of config.json, as transformers, AutoFP8,
compressed-tensors and ModelOpt write it.

All have e4m3 codes and scales that they are multiplied by. They differ in what shares a scale, and
in the name of scales: that of the codes with `_scale_inv` or `_scale` behind it, or with `.scale`
in place of `.weight`. Scales of inputs may be there as well, and are not used.
"""

from pathlib import Path
from typing import Any, NamedTuple

from speq.errors import UnsupportedError, present
from speq.files.packed_settings import COMPRESSED_TENSORS, ORIGINAL, Wanted, check_settings

# Kernels multiply blocks of one row or of multiples of so many, of multiples of so many columns.
KERNEL_ROWS, KERNEL_COLUMNS = 4, 64
# Ends of the names of scales, after those of codes.
INVERSE, PLAIN_SCALE = "_scale_inv", "_scale"
# End of the names of DeepSeek-V4's scales, in place of ".weight".
BARE_SCALE = ".scale"
E4M3_NAMES = (None, "e4m3", "float8_e4m3fn")
ACTIVATIONS = (None, "dynamic", "static")
# Formats of compressed-tensors, the second of earlier versions.
FLOAT_QUANTIZED = ("float-quantized", "naive-quantized")


class Fp8Blocks(NamedTuple):
    """Rows and columns of a matrix that share a scale; 0: all of them."""

    rows: int = 128
    columns: int = 128

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a matrix."""
        return _count(rows, self.rows), _count(columns, self.columns)

    @property
    def multiplied(self) -> bool:
        """True if kernels multiply such codes."""
        return (self.rows == 1 or self.rows % KERNEL_ROWS == 0) and (
            self.columns % KERNEL_COLUMNS == 0
        )


SQUARES = Fp8Blocks()
# What compressed-tensors calls those that need no size.
STRATEGIES = {"channel": Fp8Blocks(1, 0), "tensor": Fp8Blocks(0, 0)}


class Fp8Settings(NamedTuple):
    """What shares a scale, and how the names of scales end."""

    blocks: Fp8Blocks = SQUARES
    scales: str = INVERSE

    def scales_name(self, name: str) -> str:
        """Name of the scales of a matrix of codes."""
        return (name.removesuffix(".weight") if self.scales == BARE_SCALE else name) + self.scales


def read_fp8(settings: dict[str, Any], where: Path) -> Fp8Settings | None:
    """Read a `quantization_config`; None if it is not of FP8 alone. Raises SpeqError for what is
    not supported.
    """
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(settings, where)
    if method == COMPRESSED_TENSORS and settings.get("format") in FLOAT_QUANTIZED:
        return _compressed(settings, where)
    if method == "modelopt" and settings.get("quant_algo") == "FP8":
        return Fp8Settings(STRATEGIES["tensor"], PLAIN_SCALE)
    return None


def _fp8(settings: dict[str, Any], where: Path) -> Fp8Settings:
    size = settings.get("weight_block_size")
    blocks = None if size is None else _sized(size)
    wanted = {
        "weight_block_size": Wanted(size is None or blocks is not None, [*SQUARES]),
        "fmt": Wanted(settings.get("fmt") in E4M3_NAMES, "e4m3"),
        "activation_scheme": Wanted(settings.get("activation_scheme") in ACTIVATIONS, "dynamic"),
    }
    check_settings("fp8", settings, wanted, where)
    # Without blocks it is AutoFP8's.
    tensor = Fp8Settings(STRATEGIES["tensor"], PLAIN_SCALE)
    return tensor if blocks is None else Fp8Settings(blocks)


def _compressed(settings: dict[str, Any], where: Path) -> Fp8Settings:
    groups = settings.get("config_groups")
    kinds = groups.values() if isinstance(groups, dict) else ()
    found = {
        _blocks(each["weights"], where)
        for each in kinds
        if isinstance(each, dict) and isinstance(each.get("weights"), dict)
    }
    if len(found) != 1:
        raise UnsupportedError(
            f"{where} is quantised (compressed-tensors) with {len(found)} kinds of scales of FP8, "
            f"and one kind is read; {ORIGINAL}"
        )
    return Fp8Settings(found.pop(), PLAIN_SCALE)


def _blocks(weights: dict[str, Any], where: Path) -> Fp8Blocks:
    strategy, size = weights.get("strategy", "tensor"), weights.get("block_structure")
    blocks = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if strategy == "block":
        blocks = _sized(size.split("x") if isinstance(size, str) else size)
    elif strategy == "group":
        blocks = _sized([1, weights.get("group_size")])
    wanted = {
        "num_bits": Wanted(weights.get("num_bits") == 8, 8),
        "type": Wanted(weights.get("type") == "float", "float"),
        "symmetric": Wanted(weights.get("symmetric", True) is True, True),
        "strategy": Wanted(strategy in (*STRATEGIES, "block", "group"), "channel"),
        "block_structure": Wanted(blocks is not None or strategy != "block", [*SQUARES]),
        "group_size": Wanted(blocks is not None or strategy != "group", SQUARES.columns),
    }
    check_settings(COMPRESSED_TENSORS, weights, wanted, where)
    return present(blocks, "settings of FP8 that were checked have no blocks")


def _sized(size: Any) -> Fp8Blocks | None:
    """Blocks of so many rows and columns; None for anything but two whole numbers above 0."""
    if not isinstance(size, list) or len(size) != 2:
        return None
    found = [int(each) if isinstance(each, str) and each.isdecimal() else each for each in size]
    whole = all(type(each) is int and each > 0 for each in found)
    return Fp8Blocks(*found) if whole else None


def _count(size: int, block: int) -> int:
    return -(-size // block) if block else 1
