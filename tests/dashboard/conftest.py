"""The browser that tests of pages share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.needed import absent
from tools import chromium


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A browser without a window. An event loop runs meanwhile, hence not for a whole session."""
    reason = chromium.reason_absent()
    if reason is not None:
        absent(request.config, "browser", reason)
    with chromium.launch_browser() as launched:
        yield launched
