"""The systems by name: ours, those of the papers in our engine, and other programs."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from speq.bench.rivals.contestant import Maker
from speq.bench.rivals.job import RivalJob
from speq.config import RunConfig
from speq.errors import OptionError
from speq.options.assignments import parse_assignments
from speq.options.declared import declared_options
from speq.units import Progress

# Words in slots, none of them there but on demand: Mixtral-Offloading's policy.
ON_DEMAND = {
    "codec": "raw",
    "dense": "raw",
    "cache_policy": "lru",
    "prefetch": "none",
    "packed_copy": "none",
    "profile": "none",
}
NO_DRAFT = {"draft": "none", "draft_length": "0"}
# MoE-SpeQ as its paper has it: a draft of INT4 experts, words in slots, fetched ahead.
PAPER = {
    "codec": "raw",
    "dense": "raw",
    "draft_dense": "none",
    "draft_length": "4",
    "cache_policy": "lookahead",
    "prefetch": "three-phase",
    "packed_copy": "none",
    "profile": "none",
}


@dataclass(frozen=True, slots=True)
class System:
    """A name of `--systems`.

    module   whose `load(job)` makes the contestant
    form     whether that module's `prepare(job, progress)` writes the model in a form of its own,
             once, before any process is timed
    ours     its tokens, computed in float32, must be the exact model's
    store    the codec of the packed model it reads; None: the model as published
    options  of its run, where it is one of speq's
    draws    whether it draws tokens at a temperature
    """

    name: str
    summary: str
    module: str = "speq_system"
    form: bool = False
    ours: bool = True
    store: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False

    @property
    def maker(self) -> Maker:
        made: Maker = self._module.load
        return made

    def prepare(self, job: RivalJob, progress: Progress | None) -> None:
        """Write the form that the system reads, unless it is there. Raises SpeqError."""
        if self.form:
            self._module.prepare(job, progress)

    @property
    def _module(self) -> ModuleType:
        return importlib.import_module(f"speq.bench.rivals.{self.module}")


SYSTEMS = {
    each.name: each
    for each in (
        System("speq", "speq with defaults, on the model packed as lossless", store="lossless"),
        System("speq-residual", "the same on the model packed as residual", store="residual"),
        System("speq-published", "speq with defaults, on the folder as published"),
        System(
            "lossless",
            "lossless experts fetched on demand by LRU, no draft",
            store="lossless",
            options=ON_DEMAND | NO_DRAFT | {"codec": "lossless", "dense": "lossless"},
        ),
        System(
            "moe-speq",
            "MoE-SpeQ as in its paper: INT4 draft of 4 tokens, raw slots, fetched ahead",
            options=PAPER,
        ),
        System(
            "lru-raw",
            "raw slots on demand by LRU in the same memory (Mixtral-Offloading-SM)",
            options=ON_DEMAND | NO_DRAFT,
        ),
        System(
            "lru-raw-same-cache",
            "the same with as many slots as moe-speq has (Mixtral-Offloading-SC)",
            module="same_cache",
            options=ON_DEMAND | NO_DRAFT,
        ),
        System(
            "zipmoe",
            "ZipMoE's way to hold experts: exponents under ZSTD, pools of words and of planes",
            module="zip_moe",
            form=True,
            options=ON_DEMAND | NO_DRAFT,
        ),
        System(
            "transformers",
            "Transformers with accelerate: what does not fit is offloaded layer by layer",
            module="transformers_offload",
            ours=False,
        ),
        System(
            "llama.cpp",
            "llama.cpp on a BF16 GGUF, mapped",
            module="llama_cpp",
            form=True,
            ours=False,
            draws=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class SystemEntry:
    """A system as it was asked for: `speq draft-length=4` is speq with an option of its own."""

    label: str
    system: System
    options: Mapping[str, Any]


def system(name: str) -> System:
    """Raises SpeqError for a name that none has."""
    if name not in SYSTEMS:
        raise OptionError(f"system {name!r} is unknown; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def entry(label: str, shared: Mapping[str, Any], memory_bytes: int) -> SystemEntry:
    """The entry that a user wrote. Raises SpeqError for what is no system, or no option of it.

    shared  options of all of speq's runs
    """
    name, *parts = label.split() or [""]
    found = system(name)
    own = parse_assignments(f"system {label!r}", parts, declared_options(RunConfig))
    if not found.ours:
        if own:
            raise OptionError(f"system {label!r} has options; {name} takes none")
        return SystemEntry(label, found, {})
    options = {**shared, **found.options, **own}
    RunConfig.of(memory_bytes, **options)
    return SystemEntry(label, found, options)
