"""What the server asks of an engine, which runs several requests at a time."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from speq.config import SamplingParams
from speq.errors import SpeqError
from speq.server.token_stream import TokenStream
from speq.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is to be generated.

    prompt        text that is gone on from, or token ids
    prompt_ids    its token ids
    top_logprobs  tokens come with their odds and those of so many likeliest; None: without
    owner         who may learn what it begins with: prompts of others take over nothing of it
    """

    prompt: Prompt
    prompt_ids: list[int]
    sampling: SamplingParams
    top_logprobs: int | None = None
    owner: str = ""

    @property
    def context(self) -> int:
        """Tokens of prompt and answer at most."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class End:
    """finish_reason: "eos", "length", "stop" or "stopped"; stats: as `Request.figures` has them,
    empty for what was stopped; queued_s: how long the request waited for its turn.
    """

    finish_reason: str
    stats: dict[str, Any] = field(default_factory=dict)
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """running, waiting: requests under way, and those that wait."""

    running: int
    waiting: int


class QueueFull(SpeqError):
    """As many requests wait as may. retry_after_s: when it may be worth to ask again."""

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class Unavailable(SpeqError):
    """The engine has died, or ends."""


class EngineFailed(SpeqError):
    """The engine failed at a request that was sound."""


class EngineWorker(Protocol):
    """Generates in threads or processes of its own. All but `close` is called in an event loop,
    and none of these waits.
    """

    @property
    def capacity(self) -> int:
        """Requests that are under way or wait, at most."""

    @property
    def failure(self) -> str | None:
        """Why the engine has died; None while it lives."""

    def submit(self, request: EngineRequest) -> TokenStream:
        """Generate for a request as soon as there is room.

        Raises QueueFull and Unavailable. The stream raises these, EngineFailed, and SpeqError for
        a request that the engine cannot take.
        """

    def cancel(self, stream: TokenStream) -> None:
        """Nobody wants the rest of a stream: end it within a step. One that has ended stays so."""

    def stats(self) -> WorkerStats: ...

    def drain(self) -> None:
        """Take no more requests, and send home those that wait; those under way go on."""

    def abort(self) -> None:
        """As `drain`, and cancel those under way as well: their streams raise Unavailable."""

    def close(self) -> None:
        """As `abort`, and return when the engine is left alone."""
