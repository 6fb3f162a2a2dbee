"""Answers a file of requests, and continues where an earlier run ended."""

import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from speq.config import RunConfig, SamplingParams
from speq.offline.answer_folder import AnswerFolder
from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestFile, RequestLine
from speq.offline.settings import BatchFileSettings
from speq.units import Clock, Progress, no_progress
from speq.version import __version__

FORMAT = 1
# Options that may differ from those of the run before: what the machine gives, and not what is
# asked. A run that was out of memory continues with less of it.
MAY_DIFFER = ("memory_budget", "host_budget", "max_batch", "reader_threads")


class Answerer(Protocol):
    """Answers requests: with one generator, or with those of several machines."""

    def answers(self, lines: Iterable[RequestLine]) -> Generator[list[AnswerLine], None, None]:
        """Answers as they come, in any order, one for each request. Raises SpeqError where no more
        can be had.
        """


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Counts of a run. kept: requests that an earlier run had answered

    prompt_tokens, new_tokens, seconds  of this run
    """

    requests: int
    failed: int
    kept: int
    prompt_tokens: int
    new_tokens: int
    seconds: float

    @classmethod
    def of(cls, requests: RequestFile, folder: AnswerFolder) -> "BatchSummary":
        """The summary of a run that has nothing left to do."""
        return cls(len(requests), len(folder.failed), len(folder.kept), 0, 0, 0.0)

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens; None where this run made none."""
        return self.new_tokens / self.seconds if self.new_tokens and self.seconds else None


def header_of(
    requests: RequestFile,
    model: str,
    run: RunConfig,
    sampling: SamplingParams,
    settings: BatchFileSettings,
) -> dict[str, Any]:
    """What answers depend on. model: a digest of all that the checkpoint holds."""
    options = run.as_json() | sampling.as_json()
    options |= {"served_model_name": settings.served_model_name}
    return {
        "format": FORMAT,
        "speq": __version__,
        "model": model,
        "requests": requests.digest,
        "options": {name: value for name, value in options.items() if name not in MAY_DIFFER},
    }


def answer_all(
    requests: RequestFile,
    folder: AnswerFolder,
    answerer: Answerer,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> BatchSummary:
    """Answer the requests that have no answer yet, into the folder.

    progress  told (what, done, total)

    Raises SpeqError where the disk is full or the machine fails; what is in the folder stays.
    """
    start_s, kept = clock(), len(folder.kept)
    prompt_tokens = new_tokens = 0
    progress("answering requests", kept, len(requests))
    lines = requests.read(folder.left(requests))
    with closing(lines), closing(answerer.answers(lines)) as batches:
        for answers in batches:
            folder.add(answers)
            prompt_tokens += sum(answer.prompt_tokens for answer in answers)
            new_tokens += sum(answer.new_tokens for answer in answers)
            progress("answering requests", len(folder.kept), len(requests))
    return BatchSummary(
        len(requests), len(folder.failed), kept, prompt_tokens, new_tokens, clock() - start_s
    )
