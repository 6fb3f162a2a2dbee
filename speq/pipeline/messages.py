"""What messages ask of a stage, taken out of them field by field.

Whatever program has sent one, it asks for what a stage does, or is refused in a sentence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.errors import SpeqError, checked_int, shown
from speq.models.kv_cache import KVCache
from speq.models.packed_batch import SequenceTokens
from speq.models.tree import Tree
from speq.pipeline.wire import OTHER_PROTOCOL, Message
from speq.planning.memory import MAX_CHUNK

# More tokens than any model takes, which says so itself.
MOST_CONTEXT = 1 << 40


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory to lay out.

    context  tokens of a text
    chunk    of a prompt, as many tokens as the stages before this one run at a time
    """

    context: int
    chunk: int

    @classmethod
    def of(cls, message: Message) -> "Reservation":
        context, chunk = entries(message, "context", "chunk")
        if message.rows.numel():
            raise refused("rows beside a reservation")
        return cls(whole("context", context, 1, MOST_CONTEXT), whole("chunk", chunk, 1, MAX_CHUNK))


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Rows to run, behind what caches hold once they have followed.

    rows     [T, H], text by text
    reading  they are of a prompt
    """

    sequences: list[SequenceTokens]
    rows: Tensor
    reading: bool

    @classmethod
    def of(
        cls,
        message: Message,
        caches: list[KVCache],
        width: int,
        dtype: torch.dtype,
        chunk: int,
    ) -> "ForwardPass":
        """Have caches follow those of the first stage, and take the rows of a message.

        width  of a row; chunk: tokens of a prompt that a pass may have
        """
        sequences, reading, changes = entries(message, "texts", "reading", "changes")
        follow(changes, caches)
        made = [tokens_of_entry(each, caches) for each in listed("texts", sequences)]
        count = sum(len(sequence.token_ids) for sequence in made)
        if len({sequence.cache.number for sequence in made}) < len(made) or not made:
            raise refused("texts that do not differ")
        if not isinstance(reading, bool):
            raise refused(f"reading is {shown(reading)}")
        if reading and (len(made) > 1 or made[0].tree is not None or count > chunk):
            raise refused(f"a prompt of {count} rows and {len(made)} texts in one pass")
        if message.rows.numel() != count * width * dtype.itemsize:
            raise SpeqError(f"a pass came with other rows than it says; {OTHER_PROTOCOL}")
        return cls(made, message.rows.view(dtype).view(count, width), reading)


def follow(changes: Any, caches: list[KVCache]) -> None:
    """Do to caches what was done to those of the first stage. None goes beyond entries that passes
    have written.
    """
    for change in listed("changes", changes):
        number, name, given = listed("a change", change, 3)
        cache = caches[whole("a cache", number, 0, len(caches) - 1)]
        if name == "length":
            cache.length = whole("length", given, 0, cache.written)
        elif name == "settle" and given is None:
            cache.settle()
        elif name == "keep_path":
            path = listed("a path", given)
            least, most = 0, cache.written - cache.length - 1
            for node in path:
                least = whole("a node", node, least, most) + 1
            cache.keep_path(path)
        elif name == "take" and cache.keeps_entries:
            other, count = listed("what is taken", given, 2)
            theirs = caches[whole("a cache", other, 0, len(caches) - 1)]
            cache.take(theirs, whole("a length", count, 0, theirs.length))
        elif name == "erase" and given is None:
            cache.erase()
        else:
            raise refused(f"a KV cache is to {shown(name)} {shown(given)}")


def tokens_of_entry(entry: Any, caches: list[KVCache]) -> SequenceTokens:
    """A text's rows in a pass: the number of its cache, how many, and whose nodes they are."""
    number, count, parents = listed("a text", entry, 3)
    cache = caches[whole("a cache", number, 0, len(caches) - 1)]
    count = whole("rows of a text", count, 1)
    if count > cache.capacity - cache.length:
        raise SpeqError(f"a pass came for which there is no room; {OTHER_PROTOCOL}")
    tree = None
    if parents is not None:
        root, *others = listed("parents", parents, count)
        for node, parent in enumerate(others, start=1):
            whole("a parent", parent, 0, node - 1)
        tree = Tree((whole("the root's parent", root, -1, -1), *others), count)
    return SequenceTokens(cache, [0] * count, tree)


def refused(what: str) -> SpeqError:
    return SpeqError(f"a stage sent what no stage does ({what}); {OTHER_PROTOCOL}")


def entries(message: Message, *names: str) -> tuple[Any, ...]:
    """Those of a message, which has no others."""
    content = message.content
    if set(content) != set(names):
        raise refused(f"entries {shown(sorted(content))}")
    return tuple(content[name] for name in names)


def listed(what: str, value: Any, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise refused(f"{what} is {shown(value)}")
    return value


def whole(what: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    try:
        return checked_int(what, value, minimum, maximum)
    except SpeqError as error:
        raise refused(str(error)) from None
