"""Calls of tools while they are written: names and arguments that are certain already."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from speq.text.answer_parts import Call, MakeId, new_id

# Longer calls are told as a whole: with each piece of text all of a call is read again.
MOST_READ = 1 << 16
DECODER = json.JSONDecoder()
SPACE = re.compile(r"\s*")


@dataclass(slots=True)
class OpenCalls:
    """Tells calls piece by piece: a name, each argument as soon as it is complete, and the rest."""

    make_id: MakeId = new_id
    # Calls of which something was told, with the arguments told so far.
    _told: list[Call] = field(default_factory=list, init=False)

    def go_on(self, called: Sequence[tuple[str, str]]) -> tuple[Call, ...]:
        """Tell calls by their names and complete arguments; the last call may get more of them."""
        pieces = [
            self._piece(at, name, arguments, at < len(called) - 1)
            for at, (name, arguments) in enumerate(called)
        ]
        return tuple(piece for piece in pieces if piece is not None)

    def end(self, called: Sequence[tuple[str, str]]) -> tuple[Call, ...]:
        """Tell what is left of calls that are whole.

        A call that was told in part and turned out to be none ends with what was told of it.
        """
        told = [(call.name, "") for call in self._told[len(called) :]]
        pieces = [
            self._piece(at, name, arguments, True)
            for at, (name, arguments) in enumerate([*called, *told])
        ]
        self._told.clear()
        return tuple(piece for piece in pieces if piece is not None)

    def _piece(self, at: int, name: str, arguments: str, ends: bool) -> Call | None:
        begins = at == len(self._told)
        if begins:
            self._told.append(Call(self.make_id(), name, "", ends=False))
        before = self._told[at]
        if before.ends:
            return None
        if not ends:
            arguments = "" if arguments == "{}" else arguments.removesuffix("}")
        elif not arguments or not arguments.startswith(before.arguments):
            arguments = f"{before.arguments}}}" if before.arguments else "{}"
        fits = arguments.startswith(before.arguments)
        more = arguments.removeprefix(before.arguments) if fits else ""
        if not (more or begins or ends):
            return None
        self._told[at] = Call(before.id, before.name, before.arguments + more, ends)
        return Call(before.id, before.name, more, ends)


def open_object(text: str, at: int = 0) -> tuple[dict[str, Any], str | None, int]:
    """Members of a JSON object that are complete, in a text that may end anywhere.

    Returns them, the key of the value that is being written, if there is one, and its place.
    Raises ValueError for what is no object, and for a key that comes again.
    """
    at = behind_space(text, at)
    if text[at : at + 1] != "{":
        raise ValueError("an object begins with a brace")
    found: dict[str, Any] = {}
    while True:
        at = behind_space(text, at + 1)
        try:
            key, at = DECODER.raw_decode(text, at)
        except ValueError:
            return found, None, at
        at = behind_space(text, at)
        if not isinstance(key, str) or text[at : at + 1] not in (":", "") or key in found:
            raise ValueError("a member of an object has a name of its own")
        place = behind_space(text, at + 1)
        try:
            value, at = DECODER.raw_decode(text, place)
        except ValueError:
            return found, key if at < len(text) else None, place
        at = behind_space(text, at)
        if text[at : at + 1] not in (",", "}"):  # a number may go on
            return found, key, place
        found[key] = value
        if text[at] == "}":
            return found, None, at


def behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()
