"""Drafts with the exact model and its resident experts: it takes no memory and moves no bytes.

SS-MoE's conservative form. The routers' own choices are reported as the draft's routes, so they are
loaded for the verification.
"""

from typing import ClassVar

from speq.engine.drafter import DraftContext
from speq.engine.drafters.self_drafter import SelfDrafter
from speq.errors import present

# Scale of its logit margins, see `Confidence.assume`: it errs by whole experts.
LEAD_SCALE = 1.0


class CachedDrafter(SelfDrafter):
    """Drafts with the resident experts, which may change from layer to layer."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, context: DraftContext) -> None:
        residents = present(context.residents, "drafter cached has no slots")
        context.confidence.assume(LEAD_SCALE)
        # The host takes part in each layer, so passes are launched, not recorded.
        super().__init__(context, residents, None)
