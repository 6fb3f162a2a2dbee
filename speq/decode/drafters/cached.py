"""The exact model as draft, with the experts that lie in slots: it takes no memory, moves no bytes.

SS-MoE's conservative form. What the routers would rather have had is reported as the draft's
routes, so that it is fetched for the verification.
"""

from typing import ClassVar

from speq.decode.drafter import DraftBase
from speq.decode.drafters.twin import TwinDrafter
from speq.errors import present

# What its leads mean at first, as `Confidence.assume` has it: it errs by whole experts.
LEAD_SCALE = 1.0


class CachedDrafter(TwinDrafter):
    """Drafts with what lies in slots, which changes from layer to layer as experts arrive."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, base: DraftBase) -> None:
        residents = present(base.residents, "drafter cached begins without slots")
        base.confidence.assume(LEAD_SCALE)
        # The host has its part in each layer: passes are launched, not recorded.
        super().__init__(base, residents, None)
