"""Options of a run, checked where they enter. Imports nothing of ours but the error type."""

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speq.errors import SpeqError

UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# What Python, torch (its CPU build) and transformers take beside the budget; measured by a test.
PROCESS_BYTES = 448 << 20
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
CACHE_POLICIES = ("lru", "lfu", "entropy", "lookahead")
PREFETCH_MODES = ("none", "single-sooner", "single-later", "three-phase")
DRAFT_KERNELS = ("fused", "unfused")
CODECS = ("auto", "raw", "lossless", "residual")
# Disks give their full speed to a few large reads at a time; more only take turns with the kernels.
DEFAULT_READER_THREADS = max(2, min(4, os.cpu_count() or 1))
MAX_READER_THREADS = 64
MAX_DRAFT_LENGTH = 64


def parse_bytes(text: str | int) -> int:
    """Bytes in a size such as "8GiB", "512MiB", "1.5 GB" or a plain number of bytes.

    Raises SpeqError for anything else, and for sizes that are not positive.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", str(text))
    unit = UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise SpeqError(
            f"memory size {text!r} is not understood; give a positive number with a unit, "
            "such as 8GiB, 512MiB or 20GB"
        )
    return size


def parse_rate(name: str, text: str) -> float:
    """Bytes per second in a rate such as "25GB/s". Raises SpeqError, naming the option."""
    size, slash, second = str(text).rpartition("/")
    if not slash or second.strip().lower() != "s":
        raise SpeqError(f"{name} is {text!r}; give bytes per second with a unit, such as 25GB/s")
    try:
        return float(parse_bytes(size))
    except SpeqError as error:
        raise SpeqError(f"{name} is {text!r}: {error}") from error


def format_rate(bytes_per_s: float) -> str:
    """A rate for people: decimal units, three significant digits, as links are sold by."""
    for unit, name in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s:.3g} B/s"


def format_bytes(size: int | float) -> str:
    """A size for people: binary units, three significant digits."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            # From 999.5 on, three digits would be written with an exponent.
            return f"{size / unit:{'.3g' if abs(size) < 999.5 * unit else '.0f'}} {name}"
    return f"{size:.0f} B"


def checked_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """`value` if it is a whole number within bounds, else a SpeqError that names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpeqError(f"{name} is {value!r}; it must be a whole number")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise SpeqError(f"{name} is {value}; it must be {bounds}")
    return value


def checked_token_ids(name: str, value: Any) -> frozenset[int]:
    """The token ids in a field that holds one or a list, else a SpeqError that names it."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise SpeqError(f"{name} is {value!r}; it must be a token id or a list of them")
    return frozenset(ids)


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise SpeqError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return str(value)


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
    draft_kernel    "fused": a layer's INT4 experts in one call; "unfused": the baseline, one call
                    for each expert and projection
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
    cache_policy: str = "lru"
    prefetch: str = "none"
    codec: str = "auto"
    profile: str = "auto"
    draft_kernel: str = "fused"
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
        checked_choice("cache_policy", config.cache_policy, CACHE_POLICIES)
        checked_choice("prefetch", config.prefetch, PREFETCH_MODES)
        checked_choice("codec", config.codec, CODECS)
        checked_choice("draft_kernel", config.draft_kernel, DRAFT_KERNELS)
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
    """How tokens are chosen and when generation ends. temperature 0 is greedy; top_k 0 is off."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checked_int("max_new_tokens", self.max_new_tokens, 1)
        checked_int("top_k", self.top_k, 0)
        if self.seed is not None:
            checked_int("seed", self.seed, 0, 2**63 - 1)
        for name, high in (("temperature", math.inf), ("top_p", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpeqError(f"{name} is {value!r}; it must be a number")
            if not 0 <= value <= high or math.isinf(value):
                raise SpeqError(f"{name} is {value}; it must be from 0 to {high}")
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
