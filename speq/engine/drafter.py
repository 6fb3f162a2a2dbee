"""The protocol of drafters, and the one that proposes nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from speq.devices.device import Accelerator
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.engine.sampler import Sampler
from speq.governor.confidence import Confidence
from speq.heads.draft_head import DraftHead
from speq.layers.cached_experts import CachedExperts
from speq.layers.draft_experts import DraftExperts, OnRoute
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel


class ContinueDraft(Protocol):
    def __call__(self, drafted: int, logit_margin: float | None, parent: int | None = None) -> bool:
        """Tell whether to draft more after a token; called before each pass but the first.

        drafted       passes so far
        logit_margin  of that token, see `Draft.logit_margins`
        parent        the node before it; None: the one that the last pass ran
        """


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of a draft.

    length  passes of the drafter, and so the longest path
    nodes   tokens of a tree in all; None: the draft is a chain
    """

    length: int
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The loaded parts that a drafter may use.

    cache       of the exact model; a drafter does not change its length
    int4        the INT4 copy of the experts, if loaded
    sampler     chooses tokens on the model's device
    graphs_on   device to record passes on; None: they are launched
    confidence  estimates the acceptance of drafted tokens
    head        drafts from the exact model's hidden states, if loaded
    residents   the exact experts in slots
    """

    model: MoEModel
    cache: KVCache
    int4: DraftExperts | None
    sampler: Sampler
    graphs_on: Accelerator | None = None
    confidence: Confidence = field(default_factory=Confidence)
    head: DraftHead | None = None
    residents: CachedExperts | None = None


class DraftRequest(NamedTuple):
    """What a draft is made for.

    on_route        called with routes as they become known, by node
    continue_draft  called before each pass but the first
    """

    request: Request
    limits: DraftLimits
    on_route: OnRoute
    continue_draft: ContinueDraft


class Drafter(Protocol):
    """Proposes drafts. Made from a `DraftContext` whenever memory is laid out.

    needs_int4  True if it drafts with the INT4 copy, which then must fit the budget
    """

    needs_int4: ClassVar[bool]

    def propose(self, asked: DraftRequest) -> Draft:
        """Propose tokens after the sequence's pending one.

        Drafters whose tokens come all at once, or without routes, call neither `on_route` nor
        `continue_draft`. Drafters without trees draft chains.
        """


@runtime_checkable
class SharedPasses(Protocol):
    """A drafter whose passes can serve a batch, in which each request has its own drafter."""

    def propose_together(
        self, drafters: Sequence[Any], asking: Sequence[DraftRequest]
    ) -> list[Draft]:
        """Propose a draft for each request, with drafters of this class, including this one."""


@runtime_checkable
class SecondaryDrafter(Drafter, Protocol):
    """A drafter that can be used in addition to the run's own.

    It takes no memory, knows in advance whether it has a draft, and drafts chains.
    """

    def has_proposal(self, request: Request) -> bool:
        """Tell whether it has tokens to propose after the sequence's pending one."""


class FeatureDrafter(ABC):
    """A drafter that uses the exact model's hidden states, and is known by this base class."""

    @abstractmethod
    def common_prefix_length(self, prompt_token_ids: list[int]) -> int:
        """Number of first tokens of a prompt that the last sequence shares and it has observed."""

    @abstractmethod
    def reset(self, count: int, of: Any) -> None:
        """Begin another sequence, whose first `count` tokens `of` (this or a like drafter) knows.

        The tokens after them are run next.
        """

    @abstractmethod
    def observe_verified(self, token_ids: list[int], features: Tensor) -> None:
        """Observe the sequence's next verified tokens and their features [T, F].

        Features are last hidden states, or those that `MoEModel.tap` captures; the next pass may
        overwrite them. Chunks of the prompt come first, then after each step the token that was
        pending and the accepted ones.
        """


class PlainDecoding:
    """Proposes nothing: the exact model emits one token per step."""

    needs_int4: ClassVar[bool] = False

    def propose(self, asked: DraftRequest) -> Draft:
        return Draft()
