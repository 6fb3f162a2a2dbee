"""Packages of other systems, which speq itself does without."""

import importlib
from typing import Any

from speq.errors import DependencyError

# Packages that are not called as their modules are.
CALLED = {"llama_cpp": "llama-cpp-python"}


def rival_package(name: str) -> Any:
    """The module of that name. Raises SpeqError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyError(
            f"{name} is not installed or cannot be loaded ({error}); pip install "
            f"{CALLED.get(name, name)}"
        ) from error
