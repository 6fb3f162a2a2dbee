"""Parses and checks the messages that a pipeline stage receives.

A message from any program is either valid or refused with a sentence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.errors import PeerError, SpeqError, checked_int, format_value
from speq.models.kv_cache import KVCache
from speq.models.packed_batch import SequenceTokens
from speq.models.tree import Tree
from speq.pipeline.wire import OTHER_PROTOCOL, StageMessage
from speq.planning.memory import MAX_CHUNK

# More tokens than any model takes; the model itself checks its own limit.
MOST_CONTEXT = 1 << 40


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request to reserve memory.

    context  tokens of a sequence
    chunk    tokens of a prompt that the earlier stages run at a time
    """

    context: int
    chunk: int

    @classmethod
    def of(cls, message: StageMessage) -> "Reservation":
        context, chunk = fields_of(message, "context", "chunk")
        if message.rows.numel():
            raise invalid_message("a reservation with rows")
        return cls(
            check_int("context", context, 1, MOST_CONTEXT), check_int("chunk", chunk, 1, MAX_CHUNK)
        )


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Rows to run after the cached tokens.

    rows     [T, H], sequence by sequence
    prefill  True for rows of a prompt
    """

    sequences: list[SequenceTokens]
    rows: Tensor
    prefill: bool

    @classmethod
    def of(
        cls,
        message: StageMessage,
        caches: list[KVCache],
        width: int,
        dtype: torch.dtype,
        chunk: int,
    ) -> "ForwardPass":
        """Apply the changes of rank 0's KV caches, and take the rows of a message.

        width  of a row; chunk: most tokens of a prompt in one pass
        """
        entries, prefill, changes = fields_of(message, "texts", "reading", "changes")
        apply_changes(changes, caches)
        sequences = [tokens_of_entry(each, caches) for each in check_list("texts", entries)]
        count = sum(len(sequence.token_ids) for sequence in sequences)
        slots = {sequence.cache.number for sequence in sequences}
        if len(slots) < len(sequences) or not sequences:
            raise invalid_message("sequences that do not differ")
        if not isinstance(prefill, bool):
            raise invalid_message(f"reading is {format_value(prefill)}")
        if prefill and (len(sequences) > 1 or sequences[0].tree is not None or count > chunk):
            raise invalid_message(
                f"a prompt of {count} rows and {len(sequences)} sequences in one pass"
            )
        if message.rows.numel() != count * width * dtype.itemsize:
            raise PeerError(f"a pass came with other rows than it says; {OTHER_PROTOCOL}")
        return cls(sequences, message.rows.view(dtype).view(count, width), prefill)


def apply_changes(changes: Any, caches: list[KVCache]) -> None:
    """Apply the changes of rank 0's KV caches. None goes beyond the KV that passes have written."""
    for change in check_list("changes", changes):
        number, name, given = check_list("a change", change, 3)
        cache = caches[check_int("a cache", number, 0, len(caches) - 1)]
        if name == "length":
            cache.length = check_int("length", given, 0, cache.written)
        elif name == "settle" and given is None:
            cache.settle()
        elif name == "keep_path":
            path = check_list("a path", given)
            least, most = 0, cache.written - cache.length - 1
            for node in path:
                least = check_int("a node", node, least, most) + 1
            cache.keep_path(path)
        elif name == "take" and cache.keeps_entries:
            other, count = check_list("what is taken", given, 2)
            theirs = caches[check_int("a cache", other, 0, len(caches) - 1)]
            cache.take(theirs, check_int("a length", count, 0, theirs.length))
        elif name == "erase" and given is None:
            cache.erase()
        else:
            raise invalid_message(
                f"change {format_value(name)} {format_value(given)} of a KV cache"
            )


def tokens_of_entry(entry: Any, caches: list[KVCache]) -> SequenceTokens:
    """Parse a sequence's rows in a pass: [KV slot, number of rows, parents of a tree]."""
    number, count, parents = check_list("a sequence", entry, 3)
    cache = caches[check_int("a cache", number, 0, len(caches) - 1)]
    count = check_int("rows of a sequence", count, 1)
    if count > cache.capacity - cache.length:
        raise PeerError(f"a pass has more rows than the KV cache can take; {OTHER_PROTOCOL}")
    tree = None
    if parents is not None:
        root, *others = check_list("parents", parents, count)
        for node, parent in enumerate(others, start=1):
            check_int("a parent", parent, 0, node - 1)
        tree = Tree((check_int("the root's parent", root, -1, -1), *others), count)
    return SequenceTokens(cache, [0] * count, tree)


def invalid_message(what: str) -> SpeqError:
    return PeerError(f"a stage sent an invalid message ({what}); {OTHER_PROTOCOL}")


def fields_of(message: StageMessage, *names: str) -> tuple[Any, ...]:
    """Return the fields of a message, which must be exactly these."""
    content = message.content
    if set(content) != set(names):
        raise invalid_message(f"fields {format_value(sorted(content))}")
    return tuple(content[name] for name in names)


def check_list(what: str, value: Any, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise invalid_message(f"{what} is {format_value(value)}")
    return value


def check_int(what: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    try:
        return checked_int(what, value, minimum, maximum)
    except SpeqError as error:
        raise invalid_message(str(error)) from None
