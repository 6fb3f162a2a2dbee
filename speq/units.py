"""Sizes, rates, clocks and progress: parsed from users and formatted for them."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from speq.errors import OptionError, SpeqError

# Called with (what, done, total) during long work, or with (done, total).
Progress = Callable[[str, int, int], None]
Done = Callable[[int, int], None]


def label_progress(progress: Progress | None, label: str) -> Done | None:
    """Progress of one thing, told under a label; None where nobody is told."""
    if progress is None:
        return None
    return lambda done, total: progress(label, done, total)


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


# Seconds, from any start.
Clock = Callable[[], float]

Item = TypeVar("Item")

UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    # As programs of containers and kernels have it.
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(text: str | int) -> int:
    """Parse a size such as "8GiB", "8G", "512MiB", "1.5 GB" or a plain number of bytes.

    Raises SpeqError for anything else, and for sizes that are not positive.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", str(text))
    unit = UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise OptionError(
            f"memory size {text!r} is not understood; give a positive number with a unit, "
            "such as 8GiB, 512MiB or 20GB"
        )
    return size


def parse_rate(name: str, text: str) -> float:
    """Parse a rate such as "25GB/s" into bytes per second. Raises SpeqError, naming the option."""
    size, slash, second = str(text).rpartition("/")
    if not slash or second.strip().lower() != "s":
        raise OptionError(f"{name} is {text!r}; give bytes per second with a unit, such as 25GB/s")
    try:
        return float(parse_bytes(size))
    except SpeqError as error:
        raise OptionError(f"{name} is {text!r}: {error}") from error


def format_rate(bytes_per_s: float) -> str:
    """Format a rate: decimal units, as vendors use for links, and three significant digits."""
    for unit, name in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s:.3g} B/s"


def format_bytes(size: int | float) -> str:
    """Format a size: binary units, three significant digits."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            # From 999.5 on, three digits would be written with an exponent.
            return f"{size / unit:{'.3g' if abs(size) < 999.5 * unit else '.0f'}} {name}"
    return f"{size:.0f} B"


def format_forecast(value: float) -> str:
    """Format an expected figure: two digits say as much as a forecast knows."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def track(
    what: str, items: Iterable[Item], total: int, progress: Progress | None
) -> Iterator[Item]:
    """Yield the `total` items, and report progress after each."""
    if progress is not None:
        progress(what, 0, total)
    for done, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress(what, done, total)
