"""Pictures that a bench declares beside its columns, and that its JSON carries."""

from dataclasses import dataclass
from typing import Literal

# Bars side by side, bars one on top of the other, points side by side, points that lines join.
Mark = Literal["bars", "stack", "points", "lines"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A figure or a name in rows. title: with its unit; scale: what numbers are multiplied by."""

    key: str
    title: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn of a list of rows.

    name       within a page: small letters and hyphens
    x          what stands below; of several, their values stand side by side
    y          figures, of one unit; of several, each has a series
    by         what tells series apart, as far as rows differ in it
    low, high  keys of where error bars end, in the unit of y
    without    a value of x or by whose rows are left out, such as that of a sum
    each       a key, for each of whose values there is a picture
    rows       the list of the report
    aid        one sentence that says how to read it
    """

    name: str
    title: str
    x: tuple[Axis, ...]
    y: tuple[Axis, ...]
    by: tuple[Axis, ...] = ()
    low: str = ""
    high: str = ""
    mark: Mark = "bars"
    without: str = ""
    each: str = ""
    rows: str = "rows"
    aid: str = ""


def percent(key: str, title: str) -> Axis:
    return Axis(key, f"{title}, %", 100.0)


def megabytes(key: str, title: str) -> Axis:
    return Axis(key, f"{title}, MB", 1e-6)


def gibibytes(key: str, title: str) -> Axis:
    return Axis(key, f"{title}, GiB", 2.0**-30)


LOWER_IS_FASTER = "Lower is faster."
BUDGET = Axis("budget", "memory budget")
TPOT = Axis("tpot_ms", "time per output token, ms")
TTFT = Axis("ttft_ms", "time to first token, ms")
MOVED = megabytes("moved_bytes_per_token", "bytes moved per token")
HITS = percent("hit_rate", "requests for experts that nobody waited for")
ACCEPTED = percent("acceptance_rate", "drafted tokens that were accepted")
