"""The exceptions users see: a sentence with what was given, what was wanted, what to do."""

from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class SpeqError(ValueError):
    """Bad input, or a machine that cannot do what was asked. The message is for the user.

    code: what kind of refusal it is, for programs
    """

    code: ClassVar[str] = "invalid"


class OptionError(SpeqError):
    """An option, an argument or a field of a request has a value that cannot be taken."""

    code = "bad_option"


class FileError(SpeqError):
    """A file or a folder cannot be read or written, or is damaged."""

    code = "bad_file"


class CheckpointError(FileError):
    """A model's folder is not one, or its files contradict each other."""

    code = "bad_checkpoint"


class UnsupportedError(SpeqError):
    """Sound input that speq does not run or read."""

    code = "unsupported"


class NoRoom(SpeqError):
    """Memory or disk is too small for what was asked."""

    code = "no_room"


class DependencyError(SpeqError):
    """A package or a built library is missing, or of another version."""

    code = "missing_dependency"


class DeviceError(SpeqError):
    """The device is not there, or failed."""

    code = "device_failed"


class PeerError(SpeqError):
    """Another process does not answer, or not as this version expects."""

    code = "peer_failed"


class EngineLost(SpeqError):
    """The engine cannot continue: all further requests fail."""

    code = "engine_lost"


class Broken(RuntimeError):
    """A defect of speq itself, named by the message. No wrong result was given before it."""


def present(value: T | None, missing: str) -> T:
    """Return `value`, which is never None here; else raise Broken with `missing`."""
    if value is None:
        raise Broken(missing)
    return value


def format_value(value: Any) -> str:
    """Format a value for a sentence, at most 80 characters of it."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of thousands of digits"


def checked_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value` if it is a whole number within bounds; else raise a SpeqError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} is {format_value(value)}; it must be a whole number")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise OptionError(f"{name} is {format_value(value)}; it must be {bounds}")
    return value


def checked_number(name: str, value: Any, minimum: float, maximum: float) -> float:
    """Return `value` if it is a number within bounds; else raise a SpeqError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{name} is {value!r:.80}; it must be a number")
    if not minimum <= value <= maximum:
        raise OptionError(
            f"{name} is {format_value(value)}; it must be from {minimum:g} to {maximum:g}"
        )
    return value


def checked_text(name: str, value: Any) -> str:
    """Return `value` if it is a text; else raise a SpeqError."""
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r:.80}; it must be a text")
    return value


def checked_token_ids(name: str, value: Any) -> frozenset[int]:
    """Return the token ids of a field that holds one or a list; else raise a SpeqError."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise OptionError(
            f"{name} is {format_value(value)}; it must be a token id or a list of them"
        )
    return frozenset(ids)


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise OptionError(
            f"{name} is {format_value(value)}; it must be one of {', '.join(choices)}"
        )
    return str(value)
