"""What can be plugged in, by name: each kind has a table here, and a thing is one line of it.

The command line, `RunConfig` and docs/options.md take their choices from these tables. An entry
names its class as "module:Class", which is imported when it is first asked for, so that reading
the choices costs nothing. Code elsewhere, a test or a bench, registers its own the same way.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speq.errors import OptionError


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """thing: the class itself, or where it lies: "module:Class"."""

    thing: Any
    summary: str


class Registry:
    """Things of one kind, by name, in the order in which users are shown them."""

    def __init__(self, kind: str, **entries: tuple[str, str]) -> None:
        self.kind = kind
        self._entries = {
            name.replace("_", "-"): RegistryEntry(thing, summary)
            for name, (thing, summary) in entries.items()
        }

    def __repr__(self) -> str:
        return f"Registry({self.kind!r})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def summary(self, name: str) -> str:
        """One line for users."""
        return self._entry(name).summary

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """The class of that name. Raises SpeqError, with the names there are, for another."""
        entry = self._entry(name)
        if isinstance(entry.thing, str):
            module, _, attribute = entry.thing.partition(":")
            thing = getattr(importlib.import_module(module), attribute)
            entry = self._entries[name] = RegistryEntry(thing, entry.summary)
        return entry.thing

    def register(self, name: str, thing: Any, summary: str) -> None:
        """Add one more. Raises SpeqError where the name is taken."""
        if name in self._entries:
            raise OptionError(f"there is a {self.kind} {name!r} already; choose another name")
        self._entries[name] = RegistryEntry(thing, summary)

    @contextmanager
    def registered(self, name: str, thing: Any, summary: str = "") -> Iterator[None]:
        """`register` for the length of a block."""
        self.register(name, thing, summary)
        try:
            yield
        finally:
            del self._entries[name]

    def _entry(self, name: str) -> RegistryEntry:
        if name not in self._entries:
            raise OptionError(
                f"{self.kind} {name!r} is unknown; give one of {', '.join(self.names)}"
            )
        return self._entries[name]


CACHE_POLICIES = Registry(
    "cache policy",
    lru=("speq.scheduler.eviction:LruPolicy", "least recently used, an equal share a layer"),
    lfu=("speq.scheduler.eviction:LfuPolicy", "least frequently used of late, an equal share"),
    entropy=("speq.scheduler.eviction:EntropyPolicy", "LRU, shares by how far routing spreads"),
    lookahead=("speq.scheduler.eviction:LookaheadPolicy", "whoever is expected to be needed last"),
)
PREFETCHERS = Registry(
    "prefetch mode",
    none=("speq.scheduler.prefetch:OnDemand", "experts are fetched when a layer asks for them"),
    three_phase=("speq.scheduler.prefetch:ThreePhase", "what the draft names, while it drafts"),
)
CODECS = Registry(
    "codec",
    raw=("speq.experts.codec:RawCodec", "words as they were published"),
    lossless=("speq.experts.codec:LosslessCodec", "about 11 bits a bfloat16 weight"),
    residual=("speq.experts.codec:ResidualCodec", "about 9 bits, read over the draft's codes"),
    fp8=("speq.experts.scaled_codecs:Fp8Codec", "8 bits, as published in FP8"),
    mxfp4=("speq.experts.scaled_codecs:Mxfp4Codec", "4.25 bits, as published in MXFP4"),
    nvfp4=("speq.experts.scaled_codecs:Nvfp4Codec", "4.5 bits, as published in NVFP4"),
    int4=("speq.experts.scaled_codecs:Int4Codec", "4 bits and scales, as published in INT4"),
)
DRAFTERS = Registry(
    "drafter",
    int4=("speq.engine.drafters.int4:Int4Drafter", "the model itself with INT4 experts"),
    ngram=("speq.engine.drafters.ngram:NgramDrafter", "what followed the same words before"),
    cached=("speq.engine.drafters.cached:CachedDrafter", "the model with the experts in slots"),
    head=("speq.engine.drafters.head:HeadDrafter", "a trained layer over the model's own states"),
)
