"""A model with other weights, in experts alone, and nowhere that a fingerprint of samples looks."""

import json
import shutil
from pathlib import Path

from speq import pack
from speq.experts.packed_store import RECORDS_FILE
from speq.files.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"


def with_other_experts(model: Path, out: Path) -> Path:
    """A copy of a model in which half of the experts' tensors are of other numbers, as far as its
    fingerprint is the same.
    """
    shutil.copytree(model, out)
    path, wanted = out / WEIGHTS, fingerprint_of(model)
    content = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    changed = 0
    header = json.loads(content[8:header_bytes])
    for name in [name for name in header if ".experts." in name][::2]:
        entry = header[name]
        first, last = (header_bytes + at for at in entry["data_offsets"])
        before = content[first:last]
        numbers = [before[at : at + 2] for at in range(0, len(before), 2)]
        content[first:last] = b"".join(reversed(numbers))
        path.write_bytes(content)
        if fingerprint_of(out) != wanted:
            content[first:last] = before
        else:
            changed += 1
    path.write_bytes(content)
    assert changed > 4
    return out


def fingerprint_of(model: Path) -> str:
    checkpoint = Checkpoint(model)
    try:
        return checkpoint.fingerprint()
    finally:
        checkpoint.close()


def bytes_of_copy(model: Path, out: Path) -> int:
    """Size of the model's experts, losslessly packed."""
    pack(model, out, codec="lossless")
    return (out / RECORDS_FILE).stat().st_size
