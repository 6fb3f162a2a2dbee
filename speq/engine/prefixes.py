"""Prefix reuse: KV of earlier sequences, for prompts that begin with the same tokens.

The last bits of KV depend on the rows of its pass. The ends of a prompt's chunks depend on its
length alone (`chunk_end`), so prompts with a common prefix have the same KV, bit for bit, as far as
their chunks end at the same places.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from speq.engine.drafter import FeatureDrafter
from speq.engine.prefix_files import PrefixFiles
from speq.engine.spilled_prefixes import SpilledPrefixes
from speq.models.kv_cache import KVCache, common_prefix

# Of the name of a chunk: the states after it.
STATES = " states"
# The last chunk of a prompt is divided at this size times a power of two.
LEAST_CHUNK = 256


def chunk_end(start: int, length: int, chunk: int) -> int:
    """Return the end of the chunk that begins at `start` in a prompt of `length` tokens.

    Chunks end at multiples of `chunk`; after the last of these at the greatest power of two, from
    LEAST_CHUNK on, that fits; and with the prompt. So a prompt has one chunk more than necessary,
    and all its extensions up to the next power of two share all chunks but the last one.
    """
    base = start - start % chunk
    rest = length - base
    if rest >= chunk:
        return base + chunk
    place = base + (1 << rest.bit_length() - 1 if rest >= LEAST_CHUNK else 0)
    return place if place > start else length


@dataclass(slots=True)
class Prefixes:
    """The sequences that KV caches hold, for reuse.

    caches     by KV slot
    chunk      most tokens of a prefill pass
    kind       what is reused: "chunks" with the same ends, all "tokens", or "none"
    listeners  drafters by KV slot that must have observed what is reused; empty: none must
    files      chunks of earlier runs on disk; None: there are none
    spilled    chunks that no cache has any more; None: they are not kept
    """

    caches: list[KVCache]
    chunk: int
    kind: str = "none"
    listeners: list[FeatureDrafter] = field(default_factory=list)
    files: PrefixFiles | None = None
    spilled: SpilledPrefixes | None = None

    def end(self, start: int, length: int) -> int:
        """Return the end of the prefill pass from `start` in a prompt of `length` tokens."""
        if self.kind == "chunks":
            return chunk_end(start, length, self.chunk)
        return min(start + self.chunk, length)

    def common(self, kv_slot: int, prompt_token_ids: list[int], owner: str = "") -> int:
        """Count the first tokens of a prompt whose KV a slot has, without the prompt's last token.

        Another owner's KV does not count.
        """
        cache = self.caches[kv_slot]
        if self.kind == "none" or cache.owner != owner:
            return 0
        count = common_prefix(cache.known, prompt_token_ids[:-1])
        if self.listeners:
            count = min(count, self.listeners[kv_slot].common_prefix_length(prompt_token_ids))
        if self.kind == "tokens":
            return cache.resumable(count)
        whole = 0
        for end in cache.ends:
            if end > count or end != self.end(whole, len(prompt_token_ids)):
                break
            whole = end
        return cache.resumable(whole)

    def kv_slot_for(
        self, prompt_token_ids: list[int], kv_slots: Iterable[int], owner: str = ""
    ) -> int:
        """Choose the slot that drops the fewest tokens; among equals, the one that has most."""

        def score(kv_slot: int) -> tuple[int, int]:
            common = self.common(kv_slot, prompt_token_ids, owner)
            return common - len(self.caches[kv_slot].known), common

        return max(kv_slots, key=score)

    def begin(self, kv_slot: int, prompt_token_ids: list[int], owner: str = "") -> int:
        """Keep only the KV of a prompt's prefix in a slot; return its number of tokens.

        KV is copied from another slot that has more of it, and read from files that have more.
        """
        cache = self.caches[kv_slot]
        slots = range(len(self.caches))
        best = max(
            slots, key=lambda each: (self.common(each, prompt_token_ids, owner), each == kv_slot)
        )
        count = self.common(best, prompt_token_ids, owner)
        self.spill(cache, count if best == kv_slot else 0)
        if best == kv_slot:
            cache.resume(count)
        else:
            cache.take(self.caches[best], count)
        cache.owner = owner
        if self.listeners:
            self.listeners[kv_slot].reset(count, self.listeners[best])
        self._read_spilled(cache, prompt_token_ids)
        return self._read_files(cache, prompt_token_ids)

    def spill(self, cache: KVCache, kept: int = 0) -> None:
        """Keep the chunks of a cache beyond the first `kept` tokens, which it is to give up."""
        if self.spilled is None or self.kind != "chunks":
            return
        start = 0
        for at, end in enumerate(cache.ends):
            if end > kept:
                name = self.spilled.name(cache.owner, cache.known[:end], cache.ends[: at + 1])
                self.spilled.write(name, cache.entries(start, end))
                states = cache.states_after(end)
                if states:
                    self.spilled.write(name + STATES, states)
            start = end

    def spill_all(self) -> None:
        """Keep the chunks of all caches, which are to be given up."""
        for cache in self.caches:
            self.spill(cache)

    def _read_spilled(self, cache: KVCache, prompt_token_ids: list[int]) -> None:
        """Add the chunks of a prompt that were spilled to a cache, as far as it can go on from
        them.
        """
        spilled, start, length = self.spilled, cache.length, len(prompt_token_ids)
        if spilled is None or self.kind != "chunks":
            return
        ends, chunks = [*cache.ends], []
        while (end := self.end(ends[-1] if ends else 0, length)) < length:
            ends.append(end)
            name = spilled.name(cache.owner, prompt_token_ids[:end], ends)
            if not spilled.has(name):
                break
            chunks.append((name, end))
        while chunks and not cache.keeps_entries and not spilled.has(chunks[-1][0] + STATES):
            chunks.pop()
        read, last = [], start
        for name, end in chunks:
            if not spilled.read(name, cache.entries(last, end)):
                break
            read.append(end)
            last = end
        if chunks and not cache.keeps_entries:
            name, end = chunks[-1]
            there = len(read) == len(chunks)
            if not there or not spilled.read(name + STATES, cache.states_to_fill(end)):
                cache.clear()  # nothing can go on from entries without states
                return
        if read:
            cache.extend(prompt_token_ids[start:last], read)

    def _read_files(self, cache: KVCache, prompt_token_ids: list[int]) -> int:
        """Add the chunks of a prompt that files have to a cache; return its number of tokens."""
        start, length = cache.length, len(prompt_token_ids)
        if self.files is None:
            return start
        while (end := self.end(start, length)) < length:
            name = self.files.name(cache.owner, prompt_token_ids[:end], [*cache.ends, end])
            if not self.files.has(name) or not self.files.read(name, cache.chunk(start, end)):
                break
            cache.extend(prompt_token_ids[start:end], [end])
            start = end
        return start

    def read(self, kv_slot: int, token_ids: list[int]) -> None:
        """Note that the next tokens of a slot's prompt were run in one pass."""
        cache = self.caches[kv_slot]
        start = len(cache.known)
        end = start + len(token_ids)
        # A longer prompt has no chunk that ends where only this prompt ended.
        whole = self.kind == "chunks" and self.end(start, end + 1) == end
        if whole or self.kind == "tokens":
            cache.known += token_ids
            cache.ends.append(end)
            cache.save_states()
        if whole and self.files is not None:
            name = self.files.name(cache.owner, cache.known, cache.ends)
            self.files.write(name, cache.chunk(start, end))

    def ended(self, kv_slot: int, token_ids: list[int]) -> None:
        """Note that a slot's sequence, prompt and output, has ended or was dropped."""
        cache = self.caches[kv_slot]
        if self.kind == "tokens":
            cache.known = token_ids[: cache.length]
            cache.save_states()
