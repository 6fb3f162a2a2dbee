"""What runs come to, in this process or in one of its own under `python -O`, which leaves out every
assert: `python -O -m tests.helpers.optimised < JOBS`.
"""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from speq import Generator, SpeqError
from speq.errors import Broken
from tests.helpers.paths import ROOT


@dataclass(frozen=True)
class Job:
    """A text of which so many tokens are looked at.

    most    tokens that are asked for; 0: no more
    length  tokens of each draft, whatever options allow; None: as these say
    """

    model: str
    options: dict[str, Any]
    prompt_token_ids: list[int]
    tokens: int
    most: int = 0
    length: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def outcome_of(job: Job) -> Any:
    """The text's tokens, or the sentence that it ends with, behind its type."""
    try:
        generator = Generator.from_pretrained(job.model, **job.options)
        with closing(generator):
            generator._draft_length = job.length
            most = max(job.most, job.tokens)
            stream = generator.stream(
                job.prompt_token_ids, max_new_tokens=most, ignore_eos=True, **job.sampling
            )
            with closing(stream):
                return [token.id for token in islice(stream, job.tokens)]
    except (SpeqError, Broken) as error:
        return f"{type(error).__name__}: {error}"


def under_python_o(jobs: list[Job]) -> list[Any]:
    """The outcomes in one process without asserts."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.helpers.optimised"],
        input=json.dumps([asdict(job) for job in jobs]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def main() -> None:
    if __debug__:
        sys.exit("run this with python -O")
    torch.set_num_threads(1)
    jobs = [Job(**given) for given in json.load(sys.stdin)]
    json.dump([outcome_of(job) for job in jobs], sys.stdout)


if __name__ == "__main__":
    main()
