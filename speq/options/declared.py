"""An option is a field of a dataclass, whose annotation says what it takes and what it is for:

    prefetch: Annotated[str, Option("Who brings experts ahead.", Choice(...))] = "none"

From there it goes into `from_pretrained`, into every command that has it, and into the docs.
"""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from speq.errors import OptionError
from speq.options.kinds import OptionType

# The default of an option that must be given.
REQUIRED: Any = ...


@dataclass(frozen=True, slots=True)
class Option:
    """help: sentences for users; argument: commands take it by its place; by_set: commands take it
    as `--set NAME=VALUE`, since few users need it.
    """

    help: str
    kind: OptionType
    argument: bool = False
    by_set: bool = False

    @property
    def description(self) -> str:
        """The help, and what is taken."""
        return " ".join(filter(None, [self.help, self.kind.limits]))


@dataclass(frozen=True, slots=True)
class Nested:
    """Options of another dataclass, held as a dictionary."""

    config: type
    without: tuple[str, ...] = ()

    @property
    def options(self) -> "tuple[Declared, ...]":
        return tuple(
            each for each in declared_options(self.config) if each.name not in self.without
        )


@dataclass(frozen=True, slots=True)
class Declared:
    """An option and its field. inside: the field of `Nested` that it belongs to; panel: see
    `Options`
    """

    name: str
    option: Option
    default: Any = REQUIRED
    inside: str | None = None
    panel: str | None = None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def check(self, value: Any) -> Any:
        """The value as it is held. Raises SpeqError for what the option does not take."""
        if value is None and self.default is None:
            return None
        return self.option.kind.check(self.name, value)

    def shown(self, value: Any) -> Any:
        """What one would type for a value, or None where nothing would be."""
        if value is None and not getattr(self.option.kind, "word", None):
            return None
        return self.option.kind.text(value)


def declared_options(config: type) -> tuple[Declared, ...]:
    """The options of a dataclass, in their order."""
    if config not in _DECLARED:
        _DECLARED[config] = _read(config)
    return _DECLARED[config]


def option_names(*configs: type) -> tuple[str, ...]:
    """Names of the options of some dataclasses."""
    return tuple(each.name for config in configs for each in declared_options(config))


def _read(config: type) -> tuple[Declared, ...]:
    hints = get_type_hints(config, include_extras=True)
    found: list[Declared] = []
    for field in fields(config):
        default = REQUIRED if field.default is MISSING else field.default
        for each in _metadata(hints[field.name]):
            if isinstance(each, Option):
                owner = next(c for c in config.__mro__ if field.name in inspect.get_annotations(c))
                found.append(
                    Declared(field.name, each, default, panel=getattr(owner, "panel", None))
                )
            if isinstance(each, Nested):
                found += [replace(inner, inside=field.name) for inner in each.options]
    return tuple(found)


# What was read of a class is read once: objects are checked as they are made.
_DECLARED: dict[type, tuple[Declared, ...]] = {}


class Options:
    """A dataclass of options derives from this: each is checked as the object is made, and held as
    it should be. Raises SpeqError for values that an option does not take.

    panel  heading of its options in the help of commands; None: that of all others
    """

    __slots__ = ()
    panel: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for each in declared_options(type(self)):
            if each.inside is None:
                object.__setattr__(self, each.name, each.check(getattr(self, each.name)))

    def check_together(self) -> None:
        """Raise SpeqError for options that users may not give together."""

    def as_json(self) -> dict[str, Any]:
        """The options by name, as JSON has them: paths are texts."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]


Config = TypeVar("Config", bound=Options)


def build(config: type[Config], given: Mapping[str, Any], known: tuple[str, ...] = ()) -> Config:
    """The dataclass with the options that a user gave. Raises SpeqError for unknown, missing and
    bad ones, and for those that exclude each other.

    known  names that the caller takes itself, for the sentence
    """
    options = declared_options(config)
    refuse_unknown(given, (*(each.name for each in options), *known))
    missing = [each.name for each in options if each.required and each.name not in given]
    if missing:
        raise OptionError(f"{', '.join(missing)} must be given")
    values: dict[str, Any] = {}
    for each in options:
        if each.name in given and each.inside is None:
            values[each.name] = given[each.name]
        elif each.name in given:
            inner = values.setdefault(str(each.inside), {})
            inner[each.name] = each.check(given[each.name])
    made = config(**values)
    made.check_together()
    return made


def split(given: Mapping[str, Any], *configs: type[Options]) -> tuple[Any, ...]:
    """Each dataclass with those of the options that are its own."""
    refuse_unknown(given, option_names(*configs))
    return tuple(
        build(config, {name: given[name] for name in option_names(config) if name in given})
        for config in configs
    )


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise SpeqError for names that are none of `known`."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _metadata(hint: Any) -> tuple[Any, ...]:
    return tuple(get_args(hint)[1:]) if get_origin(hint) is Annotated else ()
