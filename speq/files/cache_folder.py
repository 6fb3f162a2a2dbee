"""The user's cache folder, and the one beside each model."""

from pathlib import Path

# Folders in the cache folder, by contents.
COPIES, DRAFTS, PROFILES, COUNTS, DIGESTS = "experts", "drafts", "profiles", "counts", "digests"
# Of files without names, which no other run sees.
SPILLED = "prefixes"
# Cache folder in a model's folder.
BESIDE = ".speq"


def cache_folder(kind: str = "") -> Path | None:
    """Path of the cache of one kind, or of all; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "speq" / kind
    except RuntimeError:
        return None


def hub_folder() -> Path:
    """The folder that models of the hub are downloaded to."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
