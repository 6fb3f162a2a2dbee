"""The model with INT4 experts as draft (MoE-SpeQ 3.4.1)."""

from typing import ClassVar

from speq.decode.drafter import DraftBase
from speq.decode.drafters.twin import TwinDrafter


class Int4Drafter(TwinDrafter):
    """Drafts with the INT4 copy of all experts."""

    needs_int4: ClassVar[bool] = True

    def __init__(self, base: DraftBase) -> None:
        assert base.int4 is not None, "planned for"
        super().__init__(base, base.int4, base.graphs_on)
