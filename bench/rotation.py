"""Settings in rotation: a machine that slows down or speeds up meanwhile favours none of them."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rotate(settings: Sequence[T], turn: int) -> list[T]:
    """All settings, of which another one is first in each turn."""
    first = turn % len(settings)
    return [*settings[first:], *settings[:first]]
