"""ZipMoE's representation (arXiv:2601.21198) in speq's engine: a baseline of our own making.

Experts are exact BF16, their exponents compressed. One part of memory holds whole experts, in
slots, and the other compressed ones, which cost less memory and have to be inflated. What is in
neither is read compressed. Nothing is drafted or prefetched, and slots are given up by least
recent use. How memory is divided is tried, once for each budget.
"""

import json
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speq.bench.rivals.contestant import Contestant
from speq.bench.rivals.generator_contestant import GeneratorContestant
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.systems import NO_DRAFT, ON_DEMAND
from speq.bench.rivals.zip_file import ensure_file
from speq.bench.rivals.zip_planes import zstandard
from speq.bench.rivals.zip_store import ZipStore
from speq.config import RunConfig
from speq.errors import OptionError
from speq.files.atomic_file import write_whole
from speq.files.json_file import read_json
from speq.generator import Generator
from speq.models.opened import Opened, open_model
from speq.models.shape import DTYPES
from speq.planning.memory import BudgetTooSmall
from speq.units import Done, Progress

# Of the memory beside the dense weights, what compressed experts get, by the names that are kept.
SHARES = {"0": 0.0, "1/3": 1 / 3, "2/3": 2 / 3}
# Where nothing is timed: both parts of memory have their work.
UNTRIED_SHARE = 1 / 3
TRIAL_TOKENS, LEAST_TRIAL_TOKENS, TRIAL_S = 16, 4, 5.0
SPLITS_FILE = "splits.json"
# What makes the system what it is.
OPTIONS: dict[str, Any] = ON_DEMAND | NO_DRAFT


def load(job: RivalJob) -> Contestant:
    """The system, memory divided as was fastest. Raises SpeqError on a GPU, without the package
    zstandard, and for a model that is packed or not in BF16.
    """
    prepare(job)
    if job.task != "time":
        try:
            return with_share(job, UNTRIED_SHARE)
        except BudgetTooSmall:
            return with_share(job, 0.0)
    path = folder_of(job) / SPLITS_FILE
    kept = read_json(path, f"remove {path}", f"remove {path}") if path.exists() else {}
    name = f"{job.memory_bytes} bytes, context {job.context}, {job.dtype}, {job.threads} threads"
    if kept.get(name, {}).keys() != SHARES.keys():
        kept[name] = tried(job)
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    return with_share(job, fastest(kept[name]), kept[name])


def check(job: RivalJob) -> None:
    """Raise SpeqError where the job asks for what is no longer this system."""
    zstandard()
    if job.device != "cpu":
        raise OptionError(
            f"the system zipmoe runs on the cpu and device is {job.device}; leave zipmoe out"
        )
    for name, value in OPTIONS.items():
        if job.options.get(name, value) != value:
            raise OptionError(
                f"{name} is {job.options[name]!r} and the system zipmoe has {value!r}; leave the "
                "option or zipmoe out"
            )


def options_of(job: RivalJob) -> dict[str, Any]:
    """Options of the run that are not for users to choose."""
    named = {"memory_budget": job.memory_bytes, "context_length": job.context, "dtype": job.dtype}
    return OPTIONS | {"device": "cpu"} | named


def prepare(job: RivalJob, progress: Progress | None = None) -> None:
    """Write the compressed experts, unless they are there. Raises as `load` does."""
    check(job)
    with closing(open_model(job.model)) as opened:
        fingerprint = opened.checkpoint.fingerprint()
        ensure_file(opened.store, fingerprint, folder_of(job), threads_of(job), told(progress))


def told(progress: Progress | None) -> Done | None:
    if progress is None:
        return None
    return lambda done, total: progress("compressing experts as ZipMoE", done, total)


def tried(job: RivalJob) -> dict[str, float | None]:
    """Milliseconds per token with each share, by its name; None where it leaves too few slots."""
    return {name: tried_share(job, share) for name, share in SHARES.items()}


def tried_share(job: RivalJob, share: float) -> float | None:
    """One share's. The system is gone when this returns: two at a time have no room."""
    try:
        made = with_share(job, share)
    except BudgetTooSmall:
        return None
    with closing(made):
        return trial_ms(made, job.prompts[-1])


def fastest(trials_ms: dict[str, float | None]) -> float:
    """The share of the least time per token; none, where no share was fast enough to be timed."""
    times_ms = {SHARES[name]: each for name, each in trials_ms.items() if each is not None}
    return min(times_ms, key=times_ms.__getitem__, default=0.0)


def trial_ms(made: GeneratorContestant, prompt_token_ids: list[int]) -> float:
    """Milliseconds per token behind a prompt."""
    until_s = time.perf_counter() + TRIAL_S
    with closing(made.stream(prompt_token_ids, TRIAL_TOKENS)) as tokens:
        for at, _ in enumerate(tokens, start=1):
            if at >= LEAST_TRIAL_TOKENS and time.perf_counter() > until_s:
                break
    return float(made.figures()["tpot_ms"])


def with_share(
    job: RivalJob, share: float, trials_ms: dict[str, float | None] | None = None
) -> GeneratorContestant:
    """The system with that share of memory for compressed experts."""
    opened = open_model(job.model)
    with ExitStack() as undo:
        undo.callback(opened.close)
        store = store_of(job, opened, share)
        undo.callback(store.close)
        beside = {"memory_budget": job.memory_bytes - store.pool_bytes}
        config = RunConfig.of(**job.options | options_of(job) | beside)
        undo.pop_all()
    generator = Generator.of_opened(replace(opened, store=store), config)
    weights = store.num_layers * store.num_experts * store.codec.shape.weights
    details = {
        "pool_bytes": store.pool_bytes,
        "pool_trials_ms": trials_ms,
        "bits_per_weight": 8 * store.file.record_bytes / weights,
    }
    return GeneratorContestant(generator, details)


def store_of(job: RivalJob, opened: Opened, share: float) -> ZipStore:
    """Compressed experts, a pool of them in that share of the memory beside the dense weights."""
    words = opened.store.codec.shape.dtype
    resident_bytes = opened.shape.resident_bytes(DTYPES.get(job.dtype, words))
    pool_bytes = int(share * max(job.memory_bytes - resident_bytes, 0))
    return ZipStore(opened.store, folder_of(job), pool_bytes, threads_of(job))


def folder_of(job: RivalJob) -> Path:
    return job.scratch_path / "zipmoe"


def threads_of(job: RivalJob) -> int:
    return job.threads or torch.get_num_threads()
