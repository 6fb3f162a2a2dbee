"""A request from its arrival to its last token, with its measurements."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from speq.config import SamplingParams
from speq.engine.draft import Outcome
from speq.engine.logit_bias import LogitBias
from speq.stats import Origin, StepStats, ratio


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and the text that is certain with it (see `speq.text.stream.TextStream`).

    logprobs  of the exact model, where they were asked for: `speq.engine.logprobs.TokenLogprobs`
    special   special tokens, which are not in `text`: behind how many characters of it each stands,
              and its own text
    origin    where it came from; None: it is not known
    waited_s  time that its step waited for experts, for the first token of a step
    """

    id: int
    text: str
    logprobs: Any = None
    special: tuple[tuple[int, str], ...] = ()
    origin: Origin | None = field(default=None, compare=False)
    waited_s: float = field(default=0.0, compare=False)


class Cancelled(Exception):
    """Ends a chunk of a prompt that nobody waits for any more."""


class RequestState(Enum):
    """WAITING for a KV slot, in PREFILL, in DECODE, or FINISHED."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Detokenizer(Protocol):
    def write(self, token_id: int, last: bool) -> bool:
        """Take the next token, the last one or not; return whether a stop string ends the text."""

    def take(self) -> list[Any]:
        """The text of each token since the last call, as `speq.text.stream.Piece`."""


class Constraint(Protocol):
    """See `speq.engine.constraint.GrammarConstraint`."""

    def allowed(self, output_token_ids: list[int], ahead: list[int]) -> Tensor | None: ...

    def forced(self, output_token_ids: list[int]) -> list[int]: ...


class LogprobsObserver(Protocol):
    def note(self, logits: Tensor, outcome: Outcome) -> None:
        """Take what the exact model [N, V] thought at the nodes of a draft, and what came of it."""

    def take(self, count: int) -> list[Any]:
        """Log-probabilities of the next `count` tokens."""


class PromptObserver(Protocol):
    def note(self, logits: Tensor, token_ids: Sequence[int]) -> None:
        """See `speq.engine.logprobs.PromptLogprobs`."""


@dataclass(slots=True)
class RequestMetrics:
    """Measurements of one request.

    arrival_s, first_token_s, last_token_s  by the engine's clock
    cached_tokens  of the prompt whose KV was reused
    steps          decode steps that it took part in; drafted, accepted: tokens in them
    batch_total    requests of these steps, summed
    moved_bytes, stall_s  of these steps: a step's bytes are shared equally by its requests, and
                   each request waited for all of its stalls
    prefill_moved_bytes, prefill_stall_s  of the chunks of its prompt
    """

    arrival_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    cached_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    batch_total: int = 0
    moved_bytes: float = 0.0
    stall_s: float = 0.0
    prefill_moved_bytes: int = 0
    prefill_stall_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from the arrival."""
        return self.first_token_s - self.arrival_s

    def add_prefill(self, step: StepStats) -> None:
        """Add a chunk of the prompt."""
        self.prefill_moved_bytes += step.moved_bytes
        self.prefill_stall_s += step.stall_s

    def add_decode(self, step: StepStats, drafted: int, accepted: int, batch_size: int) -> None:
        """Add a decode step of a batch."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.batch_total += batch_size
        self.moved_bytes += step.moved_bytes / batch_size
        self.stall_s += step.stall_s

    def summary(self, tokens: int) -> dict[str, Any]:
        """Those of `speq.stats.FIGURES` that one request of a batch has. tokens: generated"""
        return {
            "new_tokens": tokens,
            "ttft_ms": self.ttft_s * 1e3,
            "tpot_ms": ratio((self.last_token_s - self.first_token_s) * 1e3, tokens - 1),
            "steps": self.steps,
            "draft_length_mean": ratio(self.drafted, self.steps),
            "accept_length_mean": ratio(tokens - 1, self.steps),
            "acceptance_rate": ratio(self.accepted, self.drafted),
            "batch_mean": ratio(self.batch_total, self.steps),
            "moved_bytes": round(self.moved_bytes),
            "stall_s": self.stall_s,
            "prefill_moved_bytes": self.prefill_moved_bytes,
            "prefill_stall_s": self.prefill_stall_s,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(slots=True, eq=False)
class Request:
    """A request: the prompt, its options, and the output so far.

    The KV cache holds every token but the last one, the pending token.

    eos_token_ids  tokens that end it, unless sampling ignores them
    detokenizer    reads tokens as they are appended; None: no stop strings are found
    logprobs       hears how likely the tokens were; None: nobody asks
    constraint     says which tokens may follow; None: all may
    stop_token_ids  tokens that end it in any case
    bias           added to logits; None: nothing
    prompt_logprobs  hears how likely the prompt's tokens were, all of which are run then
    owner          KV of a prompt is reused for requests of the same owner only
    kv_slot        number of the KV cache that holds it
    prefilled      tokens of the prompt whose KV is there
    last_hidden    [1, H] of the last of these, while the prompt is run
    finish_reason  "eos", "length" or "stop"
    seed           of what is drawn: the one asked for, or a random one
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    logprobs: LogprobsObserver | None = None
    constraint: Constraint | None = None
    stop_token_ids: frozenset[int] = frozenset()
    bias: LogitBias | None = None
    prompt_logprobs: PromptObserver | None = None
    owner: str = ""
    state: RequestState = RequestState.WAITING
    kv_slot: int = 0
    prefilled: int = 0
    last_hidden: Tensor | None = None
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        given = self.sampling.seed
        self.seed = secrets.randbits(63) if given is None else given

    @property
    def reads_logits_alone(self) -> bool:
        """True if the choice of a greedy token depends on nothing but its logits."""
        return not self.sampling.penalises and self.constraint is None and self.bias is None

    def allowed(self, ahead: list[int]) -> Tensor | None:
        """Return the tokens [V] bool that may follow the drafted tokens `ahead`; None: all may."""
        if self.constraint is None:
            return None
        return self.constraint.allowed(self.output_token_ids, ahead)

    @property
    def forced(self) -> list[int]:
        """The tokens that are most likely forced to follow, by what the answer must follow."""
        return [] if self.constraint is None else self.constraint.forced(self.output_token_ids)

    @property
    def context(self) -> int:
        """Tokens that its KV cache needs room for."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens

    @property
    def left_to_prefill(self) -> int:
        """Tokens of the prompt that were not run yet."""
        return len(self.prompt_token_ids) - self.prefilled

    @property
    def pending_id(self) -> int:
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    @property
    def position(self) -> int:
        """Place of the next token among those generated."""
        return len(self.output_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_new_tokens - len(self.output_token_ids)

    @property
    def figures(self) -> dict[str, Any]:
        """Its metrics, by the names of `speq.stats.FIGURES`."""
        return self.metrics.summary(len(self.output_token_ids))

    def ends(self, token_id: int) -> bool:
        if token_id in self.stop_token_ids:
            return True
        return token_id in self.eos_token_ids and not self.sampling.ignore_eos

    def take(self, token_ids: list[int]) -> list[Token]:
        """Tokens that were appended since the last call, with all that is known of them."""
        logprobs = [None] * len(token_ids)
        if self.logprobs is not None:
            logprobs = self.logprobs.take(len(token_ids))
        if self.detokenizer is None:
            return [Token(each, "", known) for each, known in zip(token_ids, logprobs, strict=True)]
        pieces = zip(token_ids, self.detokenizer.take(), logprobs, strict=True)
        return [Token(each, piece.text, known, piece.special) for each, piece, known in pieces]

    def extend(self, token_ids: list[int]) -> list[int]:
        """Append tokens up to the first that ends the request; return those appended.

        Nothing else sets `finish_reason`: to "eos", "length", or "stop" where a stop string is
        complete, which goes before the other two.
        """
        for at, token_id in enumerate(token_ids, start=1):
            self.output_token_ids.append(token_id)
            if self.ends(token_id):
                self.finish_reason = "eos"
            elif self.remaining == 0:
                self.finish_reason = "length"
            last = self.finish_reason is not None
            if self.detokenizer is not None and self.detokenizer.write(token_id, last):
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                return token_ids[:at]
        return token_ids
