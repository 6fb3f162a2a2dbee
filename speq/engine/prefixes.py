"""Entries of earlier texts, for texts that begin with the same tokens.

An entry's last bits depend on the rows of the pass that made it. Where a prompt's chunks end
depends on its length alone (`chunk_end`), so two prompts that begin alike have the same entries,
bit for bit, as far as their chunks end at the same places.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from speq.engine.drafter import FeatureDrafter
from speq.models.kv_cache import KVCache, common_prefix

# Of the last chunk of a prompt that much, twice as much and so on is a chunk of its own.
LEAST_CHUNK = 256


def chunk_end(start: int, length: int, chunk: int) -> int:
    """Where the chunk from `start` of a prompt of so many tokens ends: at a multiple of `chunk`,
    behind the last of these at the greatest power of two from `LEAST_CHUNK` on that there is room
    for, or with the prompt.

    So a prompt has one chunk more than it must. All that grow from it up to the next power of two
    have the same chunks but for the last one.
    """
    base = start - start % chunk
    rest = length - base
    if rest >= chunk:
        return base + chunk
    place = base + (1 << rest.bit_length() - 1 if rest >= LEAST_CHUNK else 0)
    return place if place > start else length


@dataclass(slots=True)
class Prefixes:
    """What KV caches know of the texts that they were for.

    caches     by row
    chunk      tokens of a pass over a prompt, at most
    kind       what is reused: "chunks" that ended alike, all "tokens", or "none"
    listeners  drafters by row, which must know what is reused as well; none: no drafter listens
    """

    caches: list[KVCache]
    chunk: int
    kind: str = "none"
    listeners: list[FeatureDrafter] = field(default_factory=list)

    def end(self, start: int, length: int) -> int:
        """Where the pass from `start` over a prompt of so many tokens ends."""
        if self.kind == "chunks":
            return chunk_end(start, length, self.chunk)
        return min(start + self.chunk, length)

    def common(self, kv_slot: int, prompt_token_ids: list[int], owner: str = "") -> int:
        """Tokens of a prompt whose entries a row has. The last one is not among them: what follows
        it is asked for. Entries of another owner's texts are none.
        """
        cache = self.caches[kv_slot]
        if self.kind == "none" or cache.owner != owner:
            return 0
        count = common_prefix(cache.known, prompt_token_ids[:-1])
        if self.listeners:
            count = min(count, self.listeners[kv_slot].common_prefix_length(prompt_token_ids))
        if self.kind == "tokens":
            return count
        whole = 0
        for end in cache.ends:
            if end > count or end != self.end(whole, len(prompt_token_ids)):
                break
            whole = end
        return whole

    def kv_slot_for(
        self, prompt_token_ids: list[int], kv_slots: Iterable[int], owner: str = ""
    ) -> int:
        """Of some rows the one where least is forgotten; of equals, the one that has most of it."""

        def worth(kv_slot: int) -> tuple[int, int]:
            common = self.common(kv_slot, prompt_token_ids, owner)
            return common - len(self.caches[kv_slot].known), common

        return max(kv_slots, key=worth)

    def begin(self, kv_slot: int, prompt_token_ids: list[int], owner: str = "") -> int:
        """Forget a row's text but for what a prompt begins with; return how many tokens that is.
        Entries are copied where another row has more of them.
        """
        cache = self.caches[kv_slot]
        others = range(len(self.caches))
        best = max(
            others, key=lambda each: (self.common(each, prompt_token_ids, owner), each == kv_slot)
        )
        count = self.common(best, prompt_token_ids, owner)
        if best == kv_slot:
            cache.length = count
        else:
            cache.take(self.caches[best], count)
        cache.owner = owner
        if self.listeners:
            self.listeners[kv_slot].reset(count, self.listeners[best])
        return count

    def read(self, kv_slot: int, token_ids: list[int]) -> None:
        """The next tokens of a row's prompt were run in one pass."""
        cache = self.caches[kv_slot]
        start = len(cache.known)
        end = start + len(token_ids)
        # Where the prompt alone ended, no longer one has a chunk that ends there.
        whole = self.kind == "chunks" and self.end(start, end + 1) == end
        if whole or self.kind == "tokens":
            cache.known += token_ids
            cache.ends.append(end)

    def ended(self, kv_slot: int, token_ids: list[int]) -> None:
        """A row's text, prompt and answer, has come to its end or is given up."""
        cache = self.caches[kv_slot]
        if self.kind == "tokens":
            cache.known = token_ids[: cache.length]
