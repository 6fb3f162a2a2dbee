"""The model with INT4 experts as draft (MoE-SpeQ 3.4.1)."""

from typing import ClassVar

from speq.engine.drafter import DraftContext
from speq.engine.drafters.cached import LEAD_SCALE
from speq.engine.drafters.self_drafter import SelfDrafter
from speq.errors import present


class Int4Drafter(SelfDrafter):
    """Drafts with the INT4 copy of the experts, or of those that are used most."""

    needs_int4: ClassVar[bool] = True

    def __init__(self, context: DraftContext) -> None:
        held = present(context.int4, "drafter int4 begins without an INT4 copy of experts")
        if not held.whole:  # as one that makes do with slots, it errs by whole experts
            context.confidence.assume(LEAD_SCALE)
        super().__init__(context, held, context.graphs_on)
