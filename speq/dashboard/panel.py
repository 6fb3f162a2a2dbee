"""One picture of a page: what is drawn, how to read it, and its numbers as a table."""

from dataclasses import asdict, dataclass, field
from typing import Any

# Colours of a page's theme, light or dark. A string "@name" anywhere in a figure stands for one of
# them. The numbered ones are for series without a name of their own.
COLOURS = (
    *("draft", "verify", "prefill", "transfer", "hidden", "stall", "rest"),
    *("accepted", "exact", "waited", "expected", "text", "grid"),
    *("1", "2", "3", "4", "5", "6", "7", "8"),
)
# Whatever JSON has as a value.
Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a picture. columns: titles, with units; rows: as many cells each."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]


@dataclass(frozen=True, slots=True)
class Frames:
    """States that a slider goes through: which experts lay where, step by step.

    Each string of `slots` and `used` is a bit for each (layer, expert), layer by layer, the least
    significant bit of a byte first, in base64: which lay in slots when the step ended, and which
    the exact model asked for in it. `host` is the same of experts in a GPU's host memory, where
    they are not all there.

    labels  of each state
    """

    layers: int
    experts: int
    labels: list[str]
    slots: list[str]
    used: list[str]
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture.

    name     within the page: small letters and hyphens
    aid      one sentence that says how to read it
    data     traces of plotly.js; layout: its layout. Axes have titles with units
    absent   why there is nothing to draw; `data` is then empty
    frames   what a slider chooses from, where the page makes the traces itself
    """

    name: str
    title: str
    aid: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    absent: str = ""
    frames: Frames | None = None
    height_px: int = 360

    def to_dict(self) -> dict[str, Any]:
        """What the page's script reads."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of pictures.

    facts    (what, value) lines above them; notes: sentences below these
    summary  what to know first, above all else
    """

    title: str
    facts: list[tuple[str, str]]
    panels: list[Panel]
    notes: list[str] = field(default_factory=list)
    summary: str = ""
