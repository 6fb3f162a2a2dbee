"""How often a parameter is run: always, in the wider checks, or where all tests are."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], quick: int, wide: int = 0) -> list[Any]:
    """Parameters: the first `quick` of them always, `wide` more in the wider checks, all in full.

    values  a tuple is one for each of several names
    """
    marks = [()] * quick + [pytest.mark.wide] * wide
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=marks[at] if at < len(marks) else pytest.mark.full,
        )
        for at, value in enumerate(values)
    ]
