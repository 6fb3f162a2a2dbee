"""Options of a run as they stand in a text: names and values, separated by spaces."""

from collections.abc import Sequence
from typing import Any

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.options.declared import declared

SWITCH = {"true": True, "false": False}


def written_options(whose: str, parts: Sequence[str]) -> dict[str, Any]:
    """Of parts like `draft-nodes=8`, in the types that the options take. Those that a run does not
    have stay texts, and are refused by whoever builds it.

    whose  what the parts stand in, for the sentence

    Raises SpeqError for what is no name and value, and for what is no number where one is wanted.
    """
    kinds = {option.name: option.option.kind for option in declared(RunConfig)}
    found: dict[str, Any] = {}
    for part in parts:
        written, equals, value = part.partition("=")
        name = written.replace("-", "_")
        if not equals or not name:
            raise SpeqError(
                f"{whose} has {part!r}; give options as name=value, separated by spaces"
            )
        typed = kinds[name].typed if name in kinds else str
        try:
            found[name] = SWITCH[value.lower()] if typed is bool else typed(value)
        except (ValueError, KeyError):
            wanted = "true or false" if typed is bool else "a number"
            raise SpeqError(f"{whose} has {part!r}; {written} takes {wanted}") from None
    return found
