import ctypes
import gc
import weakref
from pathlib import Path

import pytest

from speq.files import heap


class Circle:
    itself: "Circle"


BLOCK_BYTES, BLOCKS = 100 << 10, 640


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc"
)
def test_freed_blocks_go_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(ctypes.c_size_t(BLOCK_BYTES)) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one holds the end of the heap where it is
        libc.free(ctypes.c_void_p(block))
    kept = resident_bytes()
    assert heap.give_back()
    assert kept - resident_bytes() > 0.9 * BLOCKS * BLOCK_BYTES
    libc.free(ctypes.c_void_p(blocks[-1]))


def test_a_library_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not heap.give_back()


def test_what_is_loaded_later_is_still_collected() -> None:
    heap.spare_collections()
    assert gc.get_freeze_count() > 100_000  # torch and transformers among them
    circle = Circle()
    circle.itself = circle
    gone = weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is None
    before = gc.get_freeze_count()
    heap.spare_collections()
    assert gc.get_freeze_count() <= before
