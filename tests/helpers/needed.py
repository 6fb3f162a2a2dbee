"""What a test needs and a machine may lack: skipped with a reason, unless `--need` names it."""

from typing import NoReturn

import pytest


def absent(config: pytest.Config, what: str, reason: str) -> NoReturn:
    """Skip for a reason, or fail where the run was told `--need WHAT`."""
    if what in config.getoption("need"):
        pytest.fail(reason)
    pytest.skip(reason)
