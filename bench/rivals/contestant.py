"""What each system is to the process that times it: a stream of token ids."""

from collections.abc import Iterator
from typing import Any, Protocol

from speq.bench.rivals.job import RivalJob


class Contestant(Protocol):
    """A model loaded by one system, under the memory that its job names."""

    def stream(self, prompt_token_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        """Greedy tokens as they come, never ended by an end of text; each call begins anew."""

    def figures(self) -> dict[str, Any]:
        """What the system itself counted of the last stream, by the names of docs/statistics.md."""

    def choices(self, prompt_token_ids: list[int], continuation: list[int]) -> list[int]:
        """The likeliest token in place of each token of the continuation, all before it given."""

    def settled(self) -> dict[str, Any]:
        """How the model is held: what the table shows beside the system's name."""

    def close(self) -> None: ...


class Maker(Protocol):
    """Loads a system. Raises SpeqError where it is not installed, or the job allows none."""

    def __call__(self, job: RivalJob) -> Contestant: ...
