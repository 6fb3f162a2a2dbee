"""Single passes of an engine, for measurements: they leave no request behind."""

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftLimits, FeatureDrafter
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.governor.draft_length import FixedDraftLength
from speq.models.moe_model import Scored


def attempt(engine: Engine, request: Request, limits: DraftLimits) -> RequestStep:
    """A step that leaves the request, its KV and its drafter as they were: drafted, verified, and
    with the path that would be accepted. `Engine.lookahead` has its routes until the next step.
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
    """Score a pending token after the KV of the first slot, and a draft, with the exact experts."""
    request = Request([pending_id], SamplingParams())
    step = RequestStep(request, engine.caches[0], engine.drafters[0], DraftLimits(0), draft)
    (scored,) = engine.verify([step])
    return scored


def follow(engine: Engine, token_ids: list[int], scored: Scored) -> None:
    """Go on in the first slot with tokens that `verify` has just scored: keep their KV, and tell
    the drafter. `Engine.begin_prefill` forgets what was there before.
    """
    cache, drafter = engine.caches[0], engine.drafters[0]
    cache.advance(len(token_ids))
    cache.settle()
    if isinstance(drafter, FeatureDrafter):
        drafter.observe_verified(token_ids, scored.features)
