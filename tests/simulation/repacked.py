"""A model that is packed again, beside files of its folder that no run reads, over a disk whose
reads fail.
"""

import shutil
import tracemalloc
from pathlib import Path

from speq import SpeqError, pack
from tests.simulation.disk import SimulatedDisk

# As repositories of models have it beside safetensors.
FOREIGN, FOREIGN_BYTES = "consolidated.00.pth", 96 << 20
MOST_BYTES = 48 << 20


def add_foreign(model: Path) -> None:
    with (model / FOREIGN).open("wb") as file:
        file.truncate(FOREIGN_BYTES)  # which takes no room


def check_repacked(model: Path, packed: Path, out: Path, disk: SimulatedDisk) -> None:
    """Packing ends at the same bytes, however often it is interrupted, and in little memory."""
    shutil.rmtree(out, ignore_errors=True)
    if disk.silent:
        disk.calm()  # published tensors have no checksums
    tracemalloc.start()
    try:
        while not (out / "config.json").exists():
            struck = disk.struck
            try:
                pack(model, out)
            except SpeqError:
                assert disk.struck > struck, "a pack failed over a sound disk"
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert contents(out) == contents(packed)
    assert taken < MOST_BYTES, f"packing took {taken} bytes"


def contents(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file() and each.name != "lock")
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}
