"""The model with INT4 experts as draft (MoE-SpeQ 3.4.1)."""

from typing import ClassVar

from speq.decode.drafter import DraftBase
from speq.decode.drafters.cached import LEAD_SCALE
from speq.decode.drafters.twin import TwinDrafter
from speq.errors import present


class Int4Drafter(TwinDrafter):
    """Drafts with the INT4 copy of the experts, or of those that are used most."""

    needs_int4: ClassVar[bool] = True

    def __init__(self, base: DraftBase) -> None:
        held = present(base.int4, "drafter int4 begins without an INT4 copy of experts")
        if not held.whole:  # as one that makes do with slots, it errs by whole experts
            base.confidence.assume(LEAD_SCALE)
        super().__init__(base, held, base.graphs_on)
