"""Files that are copied with a model's weights to a derived folder, without other weights."""

from fnmatch import fnmatch
from pathlib import Path

from speq.files.checkpoint import EXPERTS_MANIFEST, HUB_PATTERNS, INDEX

# Settings, tokenizers and templates, licence files, and the model card.
COPIED = (*HUB_PATTERNS, "LICENSE*", "NOTICE*", "README*")
QUANTIZE_CONFIG, QUANTIZE_REPORT = "quantize_config.json", "quantize_report.json"
NOT_COPIED = (
    *("*.safetensors", "config.json", QUANTIZE_CONFIG),
    *(INDEX, EXPERTS_MANIFEST, QUANTIZE_REPORT),
)


def is_copied(name: str) -> bool:
    """True if a file beside a model's weights is copied with them; config.json is written
    separately.
    """
    wanted = any(fnmatch(name, pattern) for pattern in COPIED)
    return wanted and not any(fnmatch(name, pattern) for pattern in NOT_COPIED)


def copied_files(folder: Path) -> list[Path]:
    """List those files of a model's folder, in order."""
    return sorted(each for each in folder.iterdir() if each.is_file() and is_copied(each.name))
