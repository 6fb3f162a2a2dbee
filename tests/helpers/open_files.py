"""Files of a folder that this process has open, whatever else it opens and closes meanwhile."""

import os
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Paths that lie below a folder, one for each descriptor; removed files are among them."""
    below = str(folder.resolve()) + "/"
    return sorted(path for path in map(target_of, os.listdir("/proc/self/fd")) if below in path)


def target_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # closed since it was listed
        return ""
