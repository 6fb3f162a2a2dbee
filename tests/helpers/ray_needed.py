"""Ray, for tests that start a cluster of it on this machine."""

import importlib.util

import pytest

from tests.helpers.needed import absent


def need_ray(config: pytest.Config) -> None:
    """Skip where Ray is not installed; fail where the run was told `--need ray`."""
    if importlib.util.find_spec("ray") is None:
        absent(config, "ray", "Ray is not installed; pip install 'ray[serve]'")
