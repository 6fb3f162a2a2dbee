"""Runs single passes of an engine for measurements, without a request in progress."""

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftLimits, FeatureDrafter
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.governor.draft_length import FixedDraftLength
from speq.models.moe_model import Scored


def attempt(engine: Engine, request: Request, limits: DraftLimits) -> RequestStep:
    """Run a step, up to the accepted path, that leaves request, KV and drafter unchanged.

    `Engine.lookahead` has its routes until the next step.
    """
    engine.recorder.begin("attempt")
    slot = request.kv_slot
    step = RequestStep(request, engine.caches[slot], engine.drafters[slot], limits)
    engine.steps = [step]
    engine.propose(engine.steps, FixedDraftLength(limits.length, nodes=limits.nodes))
    (scored,) = engine.verify(engine.steps)
    engine.accept(step, scored)
    engine.offload.loader.report()
    return step


def verify(engine: Engine, pending_id: int, draft: Draft) -> Scored:
    """Score a pending token and a draft with the exact experts, after the KV of slot 0."""
    request = Request([pending_id], SamplingParams())
    step = RequestStep(request, engine.caches[0], engine.drafters[0], DraftLimits(0), draft)
    (scored,) = engine.verify([step])
    return scored


def follow(engine: Engine, token_ids: list[int], scored: Scored) -> None:
    """Keep the KV of tokens that `verify` has just scored in slot 0, and tell the drafter.

    `Engine.begin_prefill` clears the slot.
    """
    cache, drafter = engine.caches[0], engine.drafters[0]
    cache.advance(len(token_ids))
    cache.settle()
    if isinstance(drafter, FeatureDrafter):
        drafter.observe_verified(token_ids, scored.features)
