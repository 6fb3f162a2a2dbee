"""Where runs keep what nobody asked for: the user's cache folder, and one beside each model."""

from pathlib import Path

# Folders in the cache folder, by what they hold.
COPIES, DRAFTS, PROFILES, COUNTS, DIGESTS = "experts", "drafts", "profiles", "counts", "digests"
# In a model's folder.
BESIDE = ".speq"


def cache_folder(kind: str = "") -> Path | None:
    """Where things of a kind are kept, or all of them; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "speq" / kind
    except RuntimeError:
        return None
