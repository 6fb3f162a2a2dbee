"""Kinds of options: which values one takes, as Python gives them and as people type them."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from speq.errors import OptionError, checked_choice, checked_int, format_value
from speq.registries import Registry
from speq.units import format_bytes, parse_bytes, parse_rate

# Budgets beyond any machine: they are taken for a slip.
MOST_BYTES = 1 << 50


class OptionType(Protocol):
    """A kind of values."""

    @property
    def metavar(self) -> str:
        """Stands for the value in help."""
        return "TEXT"

    @property
    def accepts(self) -> str:
        """The Python type of what callers may give."""
        return "str"

    @property
    def typed(self) -> type:
        """What the command line makes of a text before it is checked: str, int, float or bool."""
        return str

    @property
    def limits(self) -> str:
        """A sentence on what is taken, for help; empty where the metavar says it."""
        return ""

    def check(self, name: str, value: Any) -> Any:
        """The value as the option holds it. Raises SpeqError, naming the option, for others."""

    def text(self, value: Any) -> Any:
        """What one would type for a value."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Text(OptionType):
    """A text.

    wanted  what to give instead of an empty one; None: an empty one will do
    path    a path may be given as one
    """

    wanted: str | None = "a text that is not empty"
    path: bool = False

    @property
    def accepts(self) -> str:
        return "str | Path" if self.path else "str"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str | Path if self.path else str):
            raise OptionError(f"{name} is {value!r}; give {self.wanted or 'a text'}")
        return str(value) if self.wanted is None else _sound(name, value, self.wanted)


@dataclass(frozen=True, slots=True)
class File(OptionType):
    """A path.

    readable  it must not be a folder, which has nothing to read
    printed   `-` stands for the standard output
    """

    wanted: str = "a file"
    readable: bool = False
    printed: bool = False

    @property
    def metavar(self) -> str:
        return "FOLDER" if "folder" in self.wanted else "FILE"

    accepts: ClassVar[str] = "str | Path"

    def check(self, name: str, value: Any) -> Path:
        wanted = f"{self.wanted}, or - to print" if self.printed else self.wanted
        if not isinstance(value, str | Path):
            raise OptionError(f"{name} is {value!r}; give {wanted}")
        path = Path(_sound(name, value, wanted))
        if self.printed and str(path).startswith("-") and str(path) != "-":
            raise OptionError(f"{name} is {str(path)!r}; give {wanted}")
        if self.readable and path.is_dir():
            raise OptionError(f"{name} is {str(path)!r}, a folder; give {wanted}")
        return path


@dataclass(frozen=True, slots=True)
class Switch(OptionType):
    """On or off; given without a value on the command line."""

    metavar: ClassVar[str] = "true/false"
    accepts: ClassVar[str] = "bool"
    typed: ClassVar[type] = bool

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OptionError(f"{name} is {value!r}; it must be True or False")
        return value

    def text(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Choice(OptionType):
    """One of some names, and of those in a registry at the time."""

    names: tuple[str, ...] = ()
    registry: Registry | None = None
    metavar: ClassVar[str] = "NAME"

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.names, *(self.registry.names if self.registry else ()))

    @property
    def limits(self) -> str:
        return f"One of {', '.join(self.choices)}."

    def check(self, name: str, value: Any) -> str:
        return checked_choice(name, value, self.choices)


@dataclass(frozen=True, slots=True)
class Whole(OptionType):
    """A whole number within bounds, or one of some.

    word  what is typed, and may be given, for None
    """

    minimum: int = 0
    maximum: int | None = None
    word: str | None = None
    among: tuple[int, ...] = ()

    metavar: ClassVar[str] = "N"

    @property
    def limits(self) -> str:
        return f"One of {', '.join(map(str, self.among))}." if len(self.among) > 1 else ""

    @property
    def accepts(self) -> str:
        return "int" if self.word is None else "int | str | None"

    @property
    def typed(self) -> type:
        return int if self.word is None else str

    def check(self, name: str, value: Any) -> int | None:
        if self.word is not None:
            if value is None or value == self.word:
                return None
            if isinstance(value, str):
                if not re.fullmatch(r"[+-]?\d{1,18}", value):
                    raise OptionError(
                        f"{name} is {value!r}; it must be {self.word} or a whole number"
                    )
                value = int(value)
        if not self.among:
            return checked_int(name, value, self.minimum, self.maximum)
        if type(value) is not int or value not in self.among:
            raise OptionError(
                f"{name} is {value!r}; it must be one of {', '.join(map(str, self.among))}"
            )
        return value

    def text(self, value: Any) -> Any:
        if value is None:
            return self.word
        return value if self.word is None else str(value)


@dataclass(frozen=True, slots=True)
class Number(OptionType):
    """A number from minimum, which may itself be left out, to maximum."""

    maximum: float
    minimum: float = 0.0
    without_minimum: bool = False
    unit: str = ""

    @property
    def metavar(self) -> str:
        return {"milliseconds": "MS"}.get(self.unit, "X")

    accepts: ClassVar[str] = "float"
    typed: ClassVar[type] = float

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionError(f"{name} is {value!r}; it must be {self._wanted}")
        above = value > self.minimum if self.without_minimum else value >= self.minimum
        if not above or not value <= self.maximum:
            raise OptionError(f"{name} is {format_value(value)}; it must be {self._bounds}")
        return value

    @property
    def _wanted(self) -> str:
        return f"a number of {self.unit}" if self.unit else "a number"

    @property
    def _bounds(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.without_minimum:
            return f"above {self.minimum:.12g} and at most {self.maximum:.12g}{unit}"
        return f"from {self.minimum:.12g} to {self.maximum:.12g}{unit}"

    def text(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Amount(OptionType):
    """A number of things, or a share of all there are, such as "50%": held as a float up to 1.

    other  what may be given in place of either, and is held as it is
    """

    minimum: int = 1
    other: str | None = None

    metavar: ClassVar[str] = "N|SHARE%"
    accepts: ClassVar[str] = "int | str"

    def check(self, name: str, value: Any) -> int | float | str:
        if self.other is not None and value == self.other:
            return self.other
        if isinstance(value, float) and 0 < value <= 1:
            return value
        if isinstance(value, str):
            number = value.removesuffix("%").strip()
            if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number):
                raise OptionError(f"{name} is {value[:40]!r}; {self._wanted}")
            if value.endswith("%"):
                if not 0 < float(number) <= 100:
                    raise OptionError(f"{name} is {value[:40]!r}; {self._wanted}")
                return float(number) / 100
            if "." in number:
                raise OptionError(f"{name} is {value[:40]!r}; {self._wanted}")
            value = int(number)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
            raise OptionError(f"{name} is {value!r}; {self._wanted}")
        return value

    @property
    def _wanted(self) -> str:
        others = "or a share such as 50%"
        if self.other is not None:
            others = f"a share such as 50%, or {self.other}"
        return f"it must be a whole number from {self.minimum}, {others}"

    def text(self, value: Any) -> Any:
        return f"{value * 100:.12g}%" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Size(OptionType):
    """Bytes, such as "8GiB".

    kept  the text is what the option holds, once it is understood
    auto  gives the bytes for "auto"; None: that is no size
    """

    kept: bool = False
    auto: Callable[[], int] | None = None

    metavar: ClassVar[str] = "SIZE"
    accepts: ClassVar[str] = "str | int"

    def check(self, name: str, value: Any) -> Any:
        if self.auto is not None and value == "auto":
            return self.auto()
        size = parse_bytes(value)
        if size > MOST_BYTES:
            raise OptionError(
                f"{name} is {str(value)[:40]!r}; it must be at most {format_bytes(MOST_BYTES)}"
            )
        return str(value) if self.kept else size

    def text(self, value: Any) -> Any:
        return value if isinstance(value, str) else f"{value}B"


@dataclass(frozen=True, slots=True)
class Rate(OptionType):
    """Bytes per second, such as "25GB/s"."""

    metavar: ClassVar[str] = "RATE"
    accepts: ClassVar[str] = "str | float"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, str):
            value = parse_rate(name, value)
        if not isinstance(value, int | float) or not 0 < value <= MOST_BYTES:
            raise OptionError(
                f"{name} is {value!r}; it must be above 0 and at most "
                f"{format_bytes(MOST_BYTES)}/s, such as 25GB/s"
            )
        return float(value)

    def text(self, value: Any) -> Any:
        return f"{value:.0f}B/s"


@dataclass(frozen=True, slots=True)
class ListOf(OptionType):
    """Values of a kind: a sequence, or a text with commas between them.

    wanted    what to give, in the error
    repeated  typed one at a time, the option (or argument) as often as there are values; a single
              value then stands for itself, commas and all
    optional  none at all will do
    """

    each: OptionType
    wanted: str = "values separated by commas"
    repeated: bool = False
    optional: bool = False

    @property
    def metavar(self) -> str:
        return self.each.metavar if self.repeated else f"{self.each.metavar},..."

    @property
    def accepts(self) -> str:
        many = f"str | Sequence[{self.each.accepts}]"
        return f"{many} | None" if self.repeated or self.optional else many

    @property
    def limits(self) -> str:
        return "May be given several times." if self.repeated else ""

    def check(self, name: str, value: Any) -> tuple[Any, ...]:
        if (value is None and (self.repeated or self.optional)) or (value == "" and self.optional):
            values: Iterable[Any] = ()
        elif isinstance(value, str):
            values = [value] if self.repeated else map(str.strip, value.split(","))
        elif isinstance(value, list | tuple | set | frozenset):
            values = value
        else:
            raise OptionError(f"{name} is {value!r}; it must be {self.wanted}")
        return tuple(self._one(name, each, value) for each in values)

    def _one(self, name: str, each: Any, value: Any) -> Any:
        if isinstance(each, str) and self.each.typed in (int, float):
            try:
                each = self.each.typed(each)
            except ValueError:
                raise OptionError(f"{name} is {value!r}; it must be {self.wanted}") from None
            if not math.isfinite(each):
                raise OptionError(f"{name} is {value!r}; it must be {self.wanted}")
        return self.each.check(name, each)

    def text(self, value: Any) -> Any:
        if self.repeated:
            return list(value)
        return ",".join(str(self.each.text(each)) for each in value)


def _sound(name: str, value: str | Path, wanted: str) -> str:
    """A name as files have it. Raises SpeqError where no file could."""
    text = str(value)
    if text == "":
        raise OptionError(f"{name} is empty; give {wanted}")
    if "\0" in text:
        raise OptionError(f"{name} is {text!r}, with a character 0 in it; give {wanted}")
    return text
