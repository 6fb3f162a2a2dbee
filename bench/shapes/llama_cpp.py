"""llama.cpp on the same random weights and prompts, in the same memory."""

from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.machine.page_cache import drop
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.memory_cap import memory_cap
from speq.bench.rivals.process import ProcessResult, run_process
from speq.bench.rivals.systems import system
from speq.bench.settings import ShapesSettings as Settings
from speq.bench.shapes.prompts import random_tokens
from speq.errors import SpeqError
from speq.units import parse_bytes

LIMIT_S = 7200.0
# A process's code, interpreter and libraries, beside the budget.
RESERVE_BYTES = parse_bytes("0.45GiB")


def llama_cpp_rows(
    folder: Path, settings: Settings, rows: list[dict[str, Any]], vocab_size: int
) -> list[dict[str, Any]]:
    """The medians of TPOT and TTFT beside each of speq's rows of one budget, or why there are none.

    One process runs all prompts, with memory for the longest, from cold files on.
    """
    seeds = range(settings.seed, settings.seed + settings.rounds)
    job = RivalJob(
        "time",
        "llama.cpp",
        str(folder),
        rows[0]["budget_bytes"],
        [random_tokens(vocab_size, row["context"], seed) for row in rows for seed in seeds],
        settings.max_new_tokens,
        scratch=str(folder / ".speq" / "rivals"),
        temperature=1.0,
    )
    try:
        found = run_llama_cpp(job)
    except SpeqError as error:
        found = ProcessResult(failure=str(error))
    beside = []
    for at, row in enumerate(rows):
        texts = [] if found.failure else found.texts[at * len(seeds) : (at + 1) * len(seeds)]
        times = {
            "tpot_ms": [text.tpot_s * 1e3 for text in texts],
            "ttft_s": [text.ttft_s for text in texts],
        }
        told = {name: median(each) if each else None for name, each in times.items()}
        beside.append(
            {
                "budget": row["budget"],
                "context": row["context"],
                "version": found.settled.get("version"),
                "failure": found.failure,
                **told,
                "tpot_ratio": told["tpot_ms"] and told["tpot_ms"] / row["tpot_ms"],
                "ttft_ratio": told["ttft_s"] and told["ttft_s"] / row["ttft_s"],
            }
        )
    return beside


def run_llama_cpp(job: RivalJob) -> ProcessResult:
    """One process under a cap. Raises SpeqError without llama.cpp, room on disk, or a cap."""
    system(job.system).prepare(job, None)
    for file in job.scratch_path.rglob("*.gguf"):
        drop(file)
    with memory_cap(job.memory_bytes + RESERVE_BYTES) as cap:
        return run_process(job, cap, LIMIT_S)
