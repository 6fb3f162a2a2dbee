"""Options written as NAME=VALUE: of `--set`, and of what a bench compares."""

from collections.abc import Iterable, Sequence
from typing import Any

from speq.errors import OptionError
from speq.options.declared import Declared

SWITCH = {"true": True, "false": False}


def parse_assignments(
    whose: str, assignments: Sequence[str], options: Iterable[Declared]
) -> dict[str, Any]:
    """Values by name, in the types that the options take. Unknown names keep their text: whoever
    builds the options refuses them.

    whose  what the assignments stand in, for the sentence

    Raises SpeqError for what is not NAME=VALUE, for a name given twice, and for a value of another
    type.
    """
    types = {option.name: option.option.kind.typed for option in options}
    found: dict[str, Any] = {}
    for assignment in assignments:
        written, equals, value = assignment.partition("=")
        name = written.strip().replace("-", "_")
        if not equals or not name:
            raise OptionError(f"{whose} has {assignment!r:.80}; give NAME=VALUE")
        if name in found:
            raise OptionError(f"{whose} has {name} twice; give it once")
        typed = types.get(name, str)
        try:
            found[name] = SWITCH[value.lower()] if typed is bool else typed(value)
        except (ValueError, KeyError):
            wanted = "true or false" if typed is bool else "a number"
            raise OptionError(f"{whose} has {assignment!r:.80}; {name} takes {wanted}") from None
    return found
