"""Memory of slots that comes beside what runs: only slots that are there are filled, and output is
that of plain transformers.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.engine import slot_memory
from speq.engine.slot_memory import SlotMemory
from speq.files.alignment import allocate_aligned, populate
from speq.scheduler.eviction import KeepAllPolicy, LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from tests.helpers.smallest import two_slot_budget
from tests.helpers.tiny_models import greedy_tokens, load_plain

PAGE, GIB = 4096, 1 << 30
ASKED: Any = {"max_new_tokens": 12, "ignore_eos": True}
PROMPT = [3, 4, 5, 90, 17]


@dataclass(slots=True)
class Host:
    """Gives memory as far as a test has let it.

    asked   bytes of each part that was asked for
    answer  what it says of each
    """

    answer: bool = True
    asked: list[int] = field(default_factory=list)
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    reached: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def populate(self, memory: Tensor) -> bool:
        self.reached.release()
        self.allowed.acquire()
        self.asked.append(len(memory))
        return self.answer and populate(memory)

    def gives(self, parts: int = 1000) -> None:
        self.allowed.release(parts)

    def gives_while(self, act: Callable[[], None], memory: SlotMemory) -> None:
        """Give the part that is being taken once an act waits for it, and no other."""
        self.reached.acquire()
        acting = threading.Thread(target=act)
        acting.start()
        memory.left.wait()
        self.gives(1)
        acting.join()


def takers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "speq-slot-memory"]


def join_takers() -> None:
    for each in takers():
        each.join()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of which two slots of a run are there at once."""
    made = Host()
    monkeypatch.setattr(slot_memory, "populate", made.populate)
    monkeypatch.setattr("speq.engine_layout.TAKEN_BYTES", 1)
    yield made
    made.gives()
    join_takers()


def pages_there(memory: Tensor) -> list[bool]:
    """Which pages of a tensor the kernel has given (mincore(2))."""
    pages = memory.nbytes // PAGE
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(memory.data_ptr())
    assert libc.mincore(address, ctypes.c_size_t(memory.nbytes), found) == 0
    return [bool(each & 1) for each in found]


def test_memory_is_taken_and_keeps_what_it_holds() -> None:
    memory = allocate_aligned(4, 2 << 20)
    memory[1, :3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    assert not any(pages_there(memory[2:]))
    assert populate(memory[1:3])
    assert all(pages_there(memory[1:3])) and not any(pages_there(memory[3:]))
    assert memory[1, :3].tolist() == [7, 8, 9] and memory[2:].count_nonzero() == 0


def publish(cache: ExpertCache, expert: int) -> int | None:
    """The slot that an expert of the only layer is put into; None: there is none."""
    slot = cache.claim(0)
    if slot is not None:
        cache.publish(ExpertKey(0, expert), slot)
    return slot


def test_experts_go_where_memory_is(host: Host) -> None:
    cache, slots = ExpertCache(5, LruPolicy(5, 1, 16)), allocate_aligned(5, PAGE)
    memory = SlotMemory(slots, 2, cache)
    assert [publish(cache, expert) for expert in range(5)] == [0, 1, 0, 1, 0]
    assert sorted(key.expert for key in cache.residents()) == [3, 4]
    cache.pin([ExpertKey(0, 3), ExpertKey(0, 4)])
    assert publish(cache, 5) is None  # nothing is written where memory would be waited for
    host.gives(1)
    host.reached.acquire()
    host.reached.acquire()  # the next one: the one before is there
    assert cache.present == 3
    assert publish(cache, 5) == 2
    host.gives()
    join_takers()
    assert cache.present == 5 and host.asked == [PAGE] * 3
    assert [publish(cache, expert) for expert in (6, 7)] == [3, 4]
    memory.leave()
    assert cache.present == 5


def test_experts_that_all_fit_wait_for_memory(host: Host) -> None:
    """Nothing could go for them."""
    cache = ExpertCache(4, KeepAllPolicy(4, 1, 4))
    memory = SlotMemory(allocate_aligned(4, PAGE), 1, cache)
    assert [publish(cache, expert) for expert in range(4)] == [0, 1, 2, 3]
    host.gives()
    memory.leave()


def test_a_system_that_cannot_take_memory_leaves_it_to_reads(host: Host) -> None:
    cache, host.answer = ExpertCache(4, LruPolicy(4, 1, 16)), False
    memory = SlotMemory(allocate_aligned(4, PAGE), 1, cache)
    host.gives()
    join_takers()
    assert host.asked == [PAGE] and cache.present == 4
    assert [publish(cache, expert) for expert in range(4)] == [0, 1, 2, 3]
    memory.leave()


@pytest.mark.parametrize("parts", [1, 3])
def test_nothing_is_taken_after_it_was_left(
    parts: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the rest of a slot that is large."""
    monkeypatch.setattr(slot_memory, "PIECE_BYTES", PAGE)
    cache, slots = ExpertCache(9, LruPolicy(9, 1, 16)), allocate_aligned(9, parts * PAGE)
    memory = SlotMemory(slots, 1, cache)
    host.gives_while(memory.leave, memory)
    join_takers()
    assert host.asked == [PAGE] and cache.present == 9


def test_a_large_slot_is_there_when_all_of_its_parts_are(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_memory, "PIECE_BYTES", PAGE)
    cache = ExpertCache(3, LruPolicy(3, 1, 16))
    memory = SlotMemory(allocate_aligned(3, 3 * PAGE), 1, cache)
    for parts, there in ((2, 1), (1, 2)):
        host.gives(parts)
        for _ in range(parts + (there == 1)):
            host.reached.acquire()  # the last one waits: those before are there
        assert cache.present == there
    host.gives()
    join_takers()
    assert host.asked == [PAGE] * 6 and cache.present == 3
    memory.leave()


def test_slots_that_nobody_has_are_not_taken(host: Host) -> None:
    memory = SlotMemory(allocate_aligned(9, PAGE), 1, ExpertCache(9, LruPolicy(9, 1, 16)))
    host.reached.acquire()
    del memory
    gc.collect()
    host.gives()
    join_takers()
    assert host.asked == [PAGE]


def load(model: Path, budget: str = "96MiB", **options: Any) -> Generator:
    options = {"dtype": "float32", "profile": "none", "draft": "none"} | options
    return Generator.from_pretrained(model, budget, **options)


@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu", "entropy"])
def test_tokens_while_memory_comes(
    policy: str, host: Host, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too few slots for all experts, two are there, then three, then all."""
    model = tiny("olmoe")
    wanted = greedy_tokens(load_plain(model), PROMPT, 12)
    monkeypatch.setattr("speq.engine_layout.TAKEN_BYTES", GIB)
    least, demand = two_slot_budget(model, 64, "float32", 0, draft="none")
    monkeypatch.setattr("speq.engine_layout.TAKEN_BYTES", 1)
    budget = f"{least + 9 * demand.slot_bytes}B"
    options: Any = {"cache_policy": policy, "reader_threads": 2, "dense": "raw", "codec": "raw"}
    generator = load(model, budget, context_length=64, draft_length=0, **options)
    offload = generator.runtime.engine.offload
    slots, cache = offload.slots, offload.loader.cache
    assert 6 < len(slots) < 24 and cache.present == 2
    slots.zero_()  # less than a huge page is not mapped on its own
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    assert slots[:2].count_nonzero() and slots[2:].count_nonzero() == 0
    host.gives(1)
    host.reached.acquire()
    host.reached.acquire()
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    assert slots[2].count_nonzero() and slots[3:].count_nonzero() == 0
    host.gives()
    join_takers()
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    assert cache.present == len(slots) and len(cache) == len(slots)
    assert all(slot.count_nonzero() for slot in slots)
    generator.close()


def test_tokens_of_experts_that_all_fit(host: Host, tiny: Callable[[str], Path]) -> None:
    model = tiny("olmoe")
    generator = load(model)
    wanted = greedy_tokens(load_plain(model), PROMPT, 12)
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    host.gives()
    join_takers()
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    generator.close()


def test_a_smaller_budget_while_memory_comes(host: Host, tiny: Callable[[str], Path]) -> None:
    model = tiny("olmoe")
    wanted = greedy_tokens(load_plain(model), PROMPT, 12)
    generator = load(model)
    runtime = generator.runtime
    slots, memory = runtime.engine.offload.slots, runtime.engine.offload.memory
    host.gives_while(lambda: generator.resize(runtime.least_budget), memory)
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    join_takers()
    assert len(host.asked) == 1
    assert runtime.plan.slots == 2 and slots[2:].count_nonzero() == 0
    generator.resize("96MiB")
    assert generator.generate(PROMPT, **ASKED).token_ids == wanted
    assert runtime.plan.slots == len(slots) and slots[2:].count_nonzero()
    generator.close()


def test_closing_while_memory_comes(host: Host, tiny: Callable[[str], Path]) -> None:
    generator = load(tiny("olmoe"))
    offload = generator.runtime.engine.offload
    slots = offload.slots
    host.gives_while(generator.close, offload.memory)
    join_takers()
    assert len(host.asked) == 1
    assert slots.untyped_storage().nbytes() == 0 or slots.count_nonzero() == 0
