"""What goes with a model's weights to a folder that is made of them: no weights of other kinds."""

from fnmatch import fnmatch
from pathlib import Path

from speq.files.checkpoint import EXPERTS_MANIFEST, HUB_PATTERNS, INDEX

# Settings, tokenizers and templates; what the licence asks, and what its authors say of the model.
COPIED = (*HUB_PATTERNS, "LICENSE*", "NOTICE*", "README*")
QUANTIZE_CONFIG, QUANTIZE_REPORT = "quantize_config.json", "quantize_report.json"
NOT_COPIED = (
    *("*.safetensors", "config.json", QUANTIZE_CONFIG),
    *(INDEX, EXPERTS_MANIFEST, QUANTIZE_REPORT),
)


def is_copied(name: str) -> bool:
    """Whether a file beside a model's weights goes with them; config.json is written by itself."""
    wanted = any(fnmatch(name, pattern) for pattern in COPIED)
    return wanted and not any(fnmatch(name, pattern) for pattern in NOT_COPIED)


def copied_files(folder: Path) -> list[Path]:
    """Those files of a model's folder, in order."""
    return sorted(each for each in folder.iterdir() if each.is_file() and is_copied(each.name))
