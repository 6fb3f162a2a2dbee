"""The protocol of drafters, and the one that proposes nothing."""

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
        """Whether a draft goes on behind one of its tokens; asked before each pass but the first.

        drafted  passes so far
        lead     of that token, as `Draft.logit_margins` has it
        parent   the node before it; None: the one that the last pass ran
        """


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far a draft may go.

    length  passes of what drafts, and so tokens one behind another
    nodes   tokens in all of a tree; None: the draft is a chain
    """

    length: int
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The loaded parts that a drafter may draft with.

    cache      the exact model's; a drafter leaves its length as it was
    int4       the INT4 copy of the experts, where one is held
    sampler    chooses tokens where the model computes
    graphs_on  the device that passes may be recorded on; None: they are not
    confidence  how likely drafted tokens are to stand
    head       drafts out of the exact model's hidden states, where one is held
    residents  the exact experts that lie in slots
    """

    model: MoEModel
    cache: KVCache
    int4: DraftExperts | None
    sampler: Sampler
    graphs_on: Accelerator | None = None
    confidence: Confidence = field(default_factory=Confidence)
    head: DraftHead | None = None
    residents: CachedExperts | None = None


class Drafter(Protocol):
    """Made over a `DraftContext` whenever arenas are laid out.

    needs_int4  whether it drafts with the INT4 copy, which then must fit the budget
    """

    needs_int4: ClassVar[bool]

    def propose(
        self,
        request: Request,
        limits: DraftLimits,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Draft:
        """Propose tokens behind the sequence's pending one.

        on_route is told the routes as they become known, by the numbers of nodes, and go_on asked
        before each pass but the first. Drafters whose tokens come all at once, or without routes,
        need call neither. Drafters that make no trees draft chains.
        """


class DraftRequest(NamedTuple):
    """What a text asks a drafter for: the arguments of `Drafter.propose`."""

    request: Request
    limits: DraftLimits
    on_route: OnRoute
    continue_draft: ContinueDraft


@runtime_checkable
class SharedPasses(Protocol):
    """A drafter whose passes may be those of several texts, each with such a drafter of its own."""

    def propose_together(
        self, drafters: Sequence[Any], asking: Sequence[DraftRequest]
    ) -> list[Draft]:
        """Of each text its draft, of drafters made like this one, which is among them."""


@runtime_checkable
class SecondaryDrafter(Drafter, Protocol):
    """A drafter that tells beforehand whether it has a draft, so that it may be one beside another:
    it takes no memory, and drafts chains where it has any.
    """

    def has_proposal(self, request: Request) -> bool:
        """Whether it has tokens to propose behind the sequence's pending one."""


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that goes by what the exact model made of the text. Others are told nothing."""

    def common_prefix_length(self, prompt_token_ids: list[int]) -> int:
        """Tokens that a prompt begins with and that need not be heard again, by the text that was
        heard last.
        """

    def reset(self, count: int, of: Any) -> None:
        """Another text. Its first `count` tokens are known to `of`, this listener or another one
        like it, and those behind them are about to be run.
        """

    def observe_verified(self, token_ids: list[int], features: Tensor) -> None:
        """The next tokens of the text for certain, and of them what drafters go by [T, F], which
        the exact model's next pass may overwrite: last hidden states, or what `MoEModel.tap` was
        asked for. Chunks of the prompt come first, then after each round the token that was pending
        and those that were accepted.
        """


class PlainDecoding:
    """Proposes nothing: the exact model emits one token a step."""

    needs_int4: ClassVar[bool] = False

    def propose(
        self,
        request: Request,
        limits: DraftLimits,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Draft:
        return Draft()
