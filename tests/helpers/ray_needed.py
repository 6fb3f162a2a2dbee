"""Ray, for tests that start a cluster of it on this machine."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.helpers.needed import absent


def need_ray(config: pytest.Config) -> None:
    """Skip where Ray is not installed; fail where the run was told `--need ray`."""
    if importlib.util.find_spec("ray") is None:
        absent(config, "ray", "Ray is not installed; pip install 'ray[serve]'")


def processes_of(actor: str) -> list[int]:
    """Processes of this machine with such an actor in them: Ray names them by it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if re.match(rf"ray::(ServeReplica:[\w-]+:)?{actor}".encode(), words):
                found.append(int(entry.name))
    return found
