"""Models packed by tests."""

from collections.abc import Callable
from pathlib import Path

from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.models.opened import Opened, open_model
from speq.quantizing.models import packing_of


def pack_to(
    model: Path,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
    codec: str = "raw",
    draft: str = "auto",
) -> Opened:
    """Pack a model and open the result."""
    opened = open_model(model)
    try:
        assert isinstance(opened.store, SafetensorsExpertStore)
        packing = packing_of(opened, codec, draft)
        try:
            pack(opened.checkpoint, opened.store, out, packing, progress)
        finally:
            if packing.draft is not None:
                packing.draft.close()
    finally:
        opened.close()
    return open_model(out)
