"""Options of a run, checked where they enter."""

import math
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speq.errors import SpeqError, checked_choice, checked_int
from speq.registries import CACHE_POLICIES, CODECS, DRAFTERS, PREFETCHERS
from speq.units import parse_bytes

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")

# Disks give their full speed to a few large reads at a time; more only take turns with the kernels.
DEFAULT_READER_THREADS = max(2, min(4, os.cpu_count() or 1))
MAX_READER_THREADS = 64
MAX_DRAFT_LENGTH = 64
# Least and most of the numbers in SamplingParams.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1.0),
    "min_p": (0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a model is held and run. `RunConfig.of` checks what users typed.

    memory_budget   bytes for everything on the device: weights, draft, KV cache, workspace, slots
    context_length  tokens the KV cache holds; None: what each request needs
    draft           "auto", "none", or the folder or hub id of a checkpoint whose experts draft,
                    as they are (GPTQ) or rounded
    draft_length    tokens drafted per step; None: chosen by the governor, cycle by cycle
    codec           how exact experts lie in slots: "raw", "lossless" or "residual" (over the
                    draft's codes); "auto": as the model is packed, or else raw where all experts
                    fit so or encoding would hold reads up, lossless where not; with a profile as
                    the planner chooses
    profile         what `speq tune` measured, which the planner chooses codec and draft by where
                    they are left open, and `draft_length` auto begins with: "auto": the one kept
                    for this model, device, budget and version, if there is one; "none"; or a file
    verify_reads    compare a packed model's experts with their checksums whenever they are read
    reader_threads  experts read from disk at a time (device cpu)
    tpot_slo_ms     mean time per token that the governor keeps to, as far as it can
    latency_slo_ms  the same for the first cycle after the prompt, and between bursts of tokens
    """

    memory_budget: int
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    draft: str = "auto"
    draft_length: int | None = None
    drafter: str = "auto"
    cache_policy: str = "lru"
    prefetch: str = "none"
    codec: str = "auto"
    profile: str = "auto"
    verify_reads: bool = False
    reader_threads: int = DEFAULT_READER_THREADS
    tpot_slo_ms: float | None = None
    latency_slo_ms: float | None = None

    @classmethod
    def of(
        cls,
        memory_budget: str | int,
        draft_length: str | int | None = "auto",
        context_length: int | None = None,
        draft: str | Path = "auto",
        profile: str | Path = "auto",
        **options: Any,
    ) -> "RunConfig":
        unknown = sorted(set(options) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise SpeqError(f"unknown option {', '.join(unknown)}; the options are {known}")
        config = cls(
            memory_budget=parse_bytes(memory_budget),
            context_length=context_length,
            draft=str(draft),
            profile=str(profile),
            draft_length=_draft_length(draft_length),
            **options,
        )
        if context_length is not None:
            checked_int("context_length", context_length, 1)
        checked_int("reader_threads", config.reader_threads, 1, MAX_READER_THREADS)
        checked_choice("device", config.device, DEVICES)
        checked_choice("dtype", config.dtype, DTYPES)
        checked_choice("drafter", config.drafter, ("auto", "none", *DRAFTERS.names))
        checked_choice("cache_policy", config.cache_policy, CACHE_POLICIES.names)
        checked_choice("prefetch", config.prefetch, PREFETCHERS.names)
        checked_choice("codec", config.codec, ("auto", *CODECS.names))
        for name in ("tpot_slo_ms", "latency_slo_ms"):
            checked_slo(name, getattr(config, name), config.draft_length)
        if config.draft == "":
            raise SpeqError("draft is empty; give auto, none, a folder or a hub id")
        if config.profile == "":
            raise SpeqError("profile is empty; give auto, none, or a file that `speq tune` wrote")
        return config


def checked_slo(name: str, value: Any, draft_length: int | None) -> None:
    """Raises SpeqError for what is no time, and where there is nothing to choose by it."""
    if value is None:
        return
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 0 < value < math.inf:
        raise SpeqError(f"{name} is {value!r}; it must be a positive number of milliseconds")
    if draft_length is not None:
        raise SpeqError(
            f"{name} is given and draft_length is {draft_length}; objectives are kept to by "
            "choosing the draft length, which then must be auto"
        )


def _draft_length(value: str | int | None) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, str):
        if not re.fullmatch(r"[+-]?\d+", value):
            raise SpeqError(f"draft_length is {value!r}; it must be auto or a whole number")
        value = int(value)
    return checked_int("draft_length", value, 0, MAX_DRAFT_LENGTH)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    temperature         0 is greedy
    top_p               keep the likeliest tokens up to this mass
    top_k               keep this many likeliest tokens; 0 is off
    min_p               keep tokens at least this likely, as a share of the likeliest; 0 is off
    repetition_penalty  divides positive logits of all earlier tokens, the prompt's too, and
                        multiplies negative ones (arXiv:1909.05858); 1 is off
    presence_penalty    taken off the logit of each token that was generated before; 0 is off
    frequency_penalty   the same for each time that it was generated; 0 is off
    seed                of what is drawn; None: another one each time
    stop                texts to end before
    ignore_eos          go on past an end of text
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checked_int("max_new_tokens", self.max_new_tokens, 1)
        checked_int("top_k", self.top_k, 0)
        if self.seed is not None:
            checked_int("seed", self.seed, 0, 2**63 - 1)
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpeqError(f"{name} is {value!r}; it must be a number")
            if not low <= value <= min(high, sys.float_info.max):
                raise SpeqError(f"{name} is {value}; it must be from {low} to {high}")
        if self.top_p == 0:
            raise SpeqError("top_p is 0, which leaves no token to choose; it must be above 0")
        strings = isinstance(self.stop, tuple) and all(isinstance(s, str) for s in self.stop)
        if not strings or "" in self.stop:
            raise SpeqError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")
        if not isinstance(self.ignore_eos, bool):
            raise SpeqError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether a token's odds depend on those before it beyond what the model makes of them."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties)
