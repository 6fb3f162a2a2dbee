"""The process of one system: reads a job, loads the system, runs its texts, tells what it took.

`python -m speq.bench.rivals.worker` reads one JSON object (`Job`) from standard input and writes
one JSON object a line: {"loaded": ...}, {"text": ...} for each prompt, {"done": ...}, or
{"error": sentence}. Whatever libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speq.bench.rivals.contestant import Contestant
from speq.bench.rivals.job import RivalJob
from speq.bench.stolen_time import ProcessorTime
from speq.errors import OptionError, SpeqError

# Told a line that the parent reads.
Tell = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class TextRun:
    """How one text went.

    ttft_s  from the call to the first token
    tpot_s  a token from the first to the last; tokens come in bursts where drafts are accepted
    cut     it ended because time was up
    figures what the system itself counted
    stolen_share  of the processors' time, given to others by the host
    """

    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    cut: bool = False
    figures: dict[str, Any] = field(default_factory=dict)
    stolen_share: float = 0.0


def time_texts(
    contestant: Contestant,
    prompt_token_ids: list[int],
    job: RivalJob,
    clock: Callable[[], float] = time.perf_counter,
) -> TextRun:
    """Run one text, to its end or until its time is up."""
    run = TextRun()
    before = ProcessorTime.now()
    start_s = clock()
    first_s = last_s = start_s
    stream = contestant.stream(prompt_token_ids, job.max_new_tokens)
    for token_id in stream:
        last_s = clock()
        run.token_ids.append(token_id)
        if len(run.token_ids) == 1:
            first_s = last_s
        enough = len(run.token_ids) >= job.least_tokens
        if enough and last_s - first_s > job.text_s and len(run.token_ids) < job.max_new_tokens:
            run.cut = True
            break
    if isinstance(stream, Generator):
        stream.close()
    run.stolen_share = before.stolen_share(ProcessorTime.now())
    run.ttft_s = first_s - start_s
    run.tpot_s = (last_s - first_s) / max(1, len(run.token_ids) - 1)
    run.figures = contestant.figures()
    return run


def run(job: RivalJob, contestant: Contestant, tell: Tell) -> None:
    """Do what the job asks for, and tell of each text as it ends."""
    tell({"loaded": contestant.settled()})
    if job.warm_up_tokens:
        for _ in contestant.stream(job.prompts[-1], job.warm_up_tokens):
            pass
    if job.task == "choices":
        for prompt_token_ids, continuation in zip(job.prompts, job.continuations, strict=True):
            chosen = contestant.choices(prompt_token_ids, continuation)
            tell({"text": asdict(TextRun(chosen))})
    else:
        for prompt_token_ids in job.prompts:
            tell({"text": asdict(time_texts(contestant, prompt_token_ids, job))})


def peak_rss_bytes() -> int:
    """The most memory this process had at a time, of mapped files what was in memory.

    Not ru_maxrss, which a child inherits from its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) << 10
    return 0


def device_peak_bytes(job: RivalJob) -> int | None:
    """The most memory that torch had of the GPU at a time; None on the CPU."""
    if job.device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_reserved()


def limit_device(job: RivalJob) -> None:
    """Hold torch to the job's memory of a GPU: what asks for more fails."""
    if job.device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise OptionError(f"device is {job.device} and torch finds no CUDA device; give cpu")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_bytes / total))


def perform(job: RivalJob, tell: Tell) -> None:
    """Load the job's system and do the job; what it is refused for is told in a sentence."""
    from speq.bench.rivals.systems import system

    try:
        if job.temperature and not system(job.system).draws:
            raise OptionError(f"system {job.system!r} runs greedily here; give temperature 0")
        limit_device(job)
        began_s = time.perf_counter()
        with closing(system(job.system).maker(job)) as contestant:
            load_s = time.perf_counter() - began_s
            run(job, contestant, tell)
            tell(
                {
                    "done": {
                        "load_s": load_s,
                        "peak_rss_bytes": peak_rss_bytes(),
                        "device_peak_bytes": device_peak_bytes(job),
                    }
                }
            )
    except SpeqError as error:
        tell({"error": str(error)})


def main() -> int:
    """Do the job on standard input. 0: done, or refused in one sentence that is told."""
    # What libraries print must not get between our lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(line: dict[str, Any]) -> None:
        lines.write(json.dumps(line) + "\n")

    perform(RivalJob(**json.loads(sys.stdin.readline())), tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
