"""The exact model as draft, with the experts that lie in slots: it takes no memory, moves no bytes.

SS-MoE's conservative form. What the routers would rather have had is reported as the draft's
routes, so that it is fetched for the verification.
"""

from typing import ClassVar

from speq.engine.drafter import DraftContext
from speq.engine.drafters.self_drafter import SelfDrafter
from speq.errors import present

# What its leads mean at first, as `Confidence.assume` has it: it errs by whole experts.
LEAD_SCALE = 1.0


class CachedDrafter(SelfDrafter):
    """Drafts with what lies in slots, which changes from layer to layer as experts arrive."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, context: DraftContext) -> None:
        residents = present(context.residents, "drafter cached begins without slots")
        context.confidence.assume(LEAD_SCALE)
        # The host has its part in each layer: passes are launched, not recorded.
        super().__init__(context, residents, None)
