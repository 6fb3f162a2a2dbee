"""Fixtures of several files of kernels' tests."""

from collections.abc import Iterator

import pytest

from speq.kernels import library
from tests.helpers.backends import ISAS


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in library.supported_isas():
        pytest.skip(f"this processor has no {request.param}")
    before = library.isa()
    library.limit_isa(request.param)
    yield request.param
    library.limit_isa(before)
