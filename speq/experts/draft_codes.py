"""What brings INT4 codes of experts: the protocol of all draft sources."""

from typing import Protocol

from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.units import Done


class DraftSource(Protocol):
    """Opened and checked, but not read."""

    @property
    def label(self) -> str:
        """What filling an arena is called."""

    @property
    def layout(self) -> Int4Layout:
        """What an expert takes in an arena."""

    @property
    def fingerprint(self) -> str:
        """A digest that tells drafts apart without reading all of them."""

    def expert(self, at: int) -> Int4Expert:
        """One expert's codes, layer after layer. Raises SpeqError where it is damaged."""

    def fill(self, arena: Int4Arena, progress: Done | None = None) -> None:
        """Bring those that an arena of `layout` holds. Raises SpeqError for damaged ones."""

    def close(self) -> None:
        """Give back files that are the source's own."""
