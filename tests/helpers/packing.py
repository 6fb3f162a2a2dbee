"""Models packed by tests."""

import json
from pathlib import Path
from typing import Any

from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.models.opened import Opened, open_model
from speq.quantizing.models import packing_of
from speq.units import Progress, no_progress


def pack_to(
    model: Path,
    out: Path,
    progress: Progress = no_progress,
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


def without_checksums(packed: Path, **changes: Any) -> None:
    """The manifest as an earlier version wrote it, with changes."""
    path = packed / "experts.json"
    entries = json.loads(path.read_text())
    del entries["crc32"], entries["checksums"]
    path.write_text(json.dumps(entries | changes))
