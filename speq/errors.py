"""The exceptions users see: a sentence with what was given, what was wanted, what to do."""

from typing import Any, TypeVar

T = TypeVar("T")


class SpeqError(ValueError):
    """Bad input, or a machine that cannot do what was asked. The message is for the user."""


class EngineLost(SpeqError):
    """The engine cannot continue: all further requests fail."""


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
        raise SpeqError(f"{name} is {format_value(value)}; it must be a whole number")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise SpeqError(f"{name} is {format_value(value)}; it must be {bounds}")
    return value


def checked_number(name: str, value: Any, minimum: float, maximum: float) -> float:
    """Return `value` if it is a number within bounds; else raise a SpeqError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpeqError(f"{name} is {value!r:.80}; it must be a number")
    if not minimum <= value <= maximum:
        raise SpeqError(
            f"{name} is {format_value(value)}; it must be from {minimum:g} to {maximum:g}"
        )
    return value


def checked_text(name: str, value: Any) -> str:
    """Return `value` if it is a text; else raise a SpeqError."""
    if not isinstance(value, str):
        raise SpeqError(f"{name} is {value!r:.80}; it must be a text")
    return value


def checked_token_ids(name: str, value: Any) -> frozenset[int]:
    """Return the token ids of a field that holds one or a list; else raise a SpeqError."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise SpeqError(f"{name} is {format_value(value)}; it must be a token id or a list of them")
    return frozenset(ids)


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise SpeqError(f"{name} is {format_value(value)}; it must be one of {', '.join(choices)}")
    return str(value)
