"""Protocol of the sources of a draft's INT4 codes."""

from typing import Protocol

from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.units import Done


class DraftSource(Protocol):
    """A source of INT4 experts, opened and checked but not read."""

    @property
    def label(self) -> str:
        """Description of filling an arena."""

    @property
    def layout(self) -> Int4Layout:
        """Layout of an expert in an arena."""

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the draft without reading all of it."""

    def expert(self, at: int) -> Int4Expert:
        """Read the codes of expert number `at`, layer after layer. Raises SpeqError if it is
        damaged.
        """

    def fill(self, arena: Int4Arena, progress: Done | None = None) -> None:
        """Load the experts that an arena of `layout` holds. Raises SpeqError for damaged ones."""

    def close(self) -> None:
        """Close the source's own files."""
