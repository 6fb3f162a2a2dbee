"""Entries of earlier texts, for texts that begin with the same tokens.

An entry's last bits depend on the rows of the pass that made it. A prompt is run in chunks from its
first token on, so a chunk of the same tokens at the same place has the same entries, bit for bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from speq.decode.drafter import Listener
from speq.models.kv_cache import KVCache, common_prefix


@dataclass(slots=True)
class Prefixes:
    """What KV caches know of the texts that they were for.

    caches     by row
    chunk      tokens of a pass over a prompt
    kind       what is reused: "chunks" that are whole, all "tokens", or "none"
    listeners  drafters by row, which must know what is reused as well; none: no drafter listens
    """

    caches: list[KVCache]
    chunk: int
    kind: str = "none"
    listeners: list[Listener] = field(default_factory=list)

    def common(self, row: int, prompt_ids: list[int]) -> int:
        """Tokens of a prompt whose entries a row has. The last one is not among them: what follows
        it is asked for.
        """
        if self.kind == "none":
            return 0
        count = common_prefix(self.caches[row].known, prompt_ids[:-1])
        if self.listeners:
            count = min(count, self.listeners[row].knows(prompt_ids))
        return count if self.kind == "tokens" else count - count % self.chunk

    def row_for(self, prompt_ids: list[int], rows: Iterable[int]) -> int:
        """Of some rows the one where least is forgotten; of equals, the one that has most of it."""

        def worth(row: int) -> tuple[int, int]:
            common = self.common(row, prompt_ids)
            return common - len(self.caches[row].known), common

        return max(rows, key=worth)

    def begin(self, row: int, prompt_ids: list[int]) -> int:
        """Forget a row's text but for what a prompt begins with; return how many tokens that is.
        Entries are copied where another row has more of them.
        """
        cache = self.caches[row]
        others = range(len(self.caches))
        best = max(others, key=lambda each: (self.common(each, prompt_ids), each == row))
        count = self.common(best, prompt_ids)
        if best == row:
            cache.length = count
        else:
            cache.take(self.caches[best], count)
        if self.listeners:
            self.listeners[row].begin(count, self.listeners[best])
        return count

    def read(self, row: int, token_ids: list[int]) -> None:
        """The next tokens of a row's prompt were run in one pass."""
        whole = len(token_ids) == self.chunk and self.kind == "chunks"
        if whole or self.kind == "tokens":
            self.caches[row].known += token_ids

    def ended(self, row: int, token_ids: list[int]) -> None:
        """A row's text, prompt and answer, has come to its end or is given up."""
        cache = self.caches[row]
        if self.kind == "tokens":
            cache.known = token_ids[: cache.length]
