"""Experts in host memory: which, in what records, what is locked, and that none stays so."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator, SpeqError
from speq.experts import passes
from speq.experts.codec import codec_of
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.experts.host_tier import HostRoom, HostTier, fewest_records
from speq.experts.passes import for_each_key, spread_by_layer
from speq.experts.pinned_arena import PinnedArena
from speq.files.alignment import ALIGNMENT, align
from speq.models.opened import Opened, open_model
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

READERS = 2
PROMPT = [1, 2, 3, 4]
CHUNK = 3 << 14  # of a few records


class Locking(HostDevice):
    """A device that remembers what it was asked to lock, and locks the first few of it."""

    def __init__(self, granted: int = 1 << 30) -> None:
        super().__init__(may_pin=lambda: len(self.asked) <= granted)
        self.asked: list[int] = []

    def pin(self, memory: Tensor) -> bool:
        self.asked.append(memory.nbytes)
        return super().pin(memory)


@pytest.fixture
def opened(tiny_bfloat16: Callable[[str], Path]) -> Opened:
    return open_model(tiny_bfloat16("olmoe"))


@dataclass
class Counting:
    """A store that counts reads, and fails at one of them.

    noise  whether odd experts are random bits, whose records are larger
    """

    store: ExpertStore
    failing: tuple[int, int] | None = None
    error: type[BaseException] = SpeqError
    noise: bool = False
    reads: Counter[tuple[int, int]] = field(default_factory=Counter)
    lock: Lock = field(default_factory=Lock)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, layer: int, expert: int, slot: Tensor, *arrived: Any) -> int:
        with self.lock:
            self.reads[layer, expert] += 1
        if (layer, expert) == self.failing:
            raise self.error("the disk is gone")
        noisy = self.noise and expert % 2  # which comes after all matrices
        read_bytes = self.store.read(layer, expert, slot, *(() if noisy else arrived))
        if noisy:
            generator = torch.Generator().manual_seed(100 * layer + expert)
            slot.random_(0, 256, generator=generator)
        return read_bytes


def room(limit_bytes: int, device: Locking | None = None) -> HostRoom:
    return HostRoom(device or Locking(), limit_bytes, READERS, CHUNK)


def encoding(store: Any) -> EncodingStore:
    return EncodingStore(store, codec_of("lossless", store.codec.shape))


def expected(store: ExpertStore) -> dict[tuple[int, int], Tensor]:
    """Each expert's record, read one by one."""
    found = {}
    slot = expert_slot(store)
    for key in spread_by_layer(store.num_layers, store.num_experts):
        store.read(*key, slot)
        found[key] = slot[: store.record_bytes(*key)].clone()
    return found


def check_contents(tier: HostTier, store: ExpertStore) -> None:
    records = expected(store)
    assert len(set(tier.contents)) == len(tier.contents) <= tier.num_records
    for at, key in enumerate(tier.contents):
        nbytes = tier.record_bytes(*key)
        assert torch.equal(tier.record(at)[:nbytes], records[key])
        assert nbytes == len(records[key])


@pytest.mark.parametrize("encoded", [False, True])
def test_all_experts_are_read_once_and_held(encoded: bool, opened: Opened) -> None:
    plain = Counting(opened.store)
    device = Locking()
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    if encoded:
        store: ExpertStore = encoding(plain)
        tier = HostTier.encode(store, None, room(1 << 30, device), tell)  # type: ignore[arg-type]
    else:
        store = opened.store
        tier = HostTier.load(plain, room(1 << 30, device), tell)
    count = store.num_layers * store.num_experts
    assert tier.resident and tier.num_records == len(tier.contents) == count
    assert plain.reads == Counter(spread_by_layer(store.num_layers, store.num_experts))
    assert told == [(done, count) for done in range(1, count + 1)]
    check_contents(tier, store)
    assert tier.codec == store.codec
    # All in chunks of a size, but for the last one; each is locked by itself.
    assert len(device.asked) > 2
    assert len(set(device.asked[:-1])) == 1 and device.asked[-1] <= device.asked[0] <= CHUNK
    assert tier.pinned_bytes == tier.nbytes == sum(device.pinned.values())
    fewest = sum(align(store.record_bytes(*key)) for key in tier.contents)
    assert fewest <= tier.nbytes < 1.2 * fewest + CHUNK
    tier.close()
    assert device.pinned == {} and tier.nbytes == 0
    tier.close()


@pytest.mark.parametrize("encoded", [False, True])
def test_as_many_as_fit_of_all_layers_alike(
    encoded: bool, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = encoding(Counting(opened.store, noise=True)) if encoded else opened.store
    count = store.num_layers * store.num_experts
    # Records are smaller than words: by how much, nobody knows before.
    limit = (7 if encoded else 6) * count // 8 * opened.store.codec.slot_bytes
    least = 9 if encoded else 6 * count // 8 - fewest_records(READERS, count)
    if isinstance(store, EncodingStore):
        tier = HostTier.encode(store, None, room(limit))
    else:
        tier = HostTier.load(store, room(limit))
    assert not tier.resident and tier.nbytes <= limit
    check_contents(tier, store)
    slot_bytes = store.codec.slot_bytes
    if encoded:
        sizes = {align(store.record_bytes(*key)) for key in tier.contents}
        assert sizes == {slot_bytes - ALIGNMENT, slot_bytes}  # they lay close to each other
    assert {len(tier.record(at)) for at in range(tier.num_records)} == {slot_bytes}
    # Records do not overlap, and reads past the page cache may go into each.
    places = sorted(tier.record(at).data_ptr() for at in range(tier.num_records))
    assert all(place % ALIGNMENT == 0 for place in places)
    assert all(b - a >= slot_bytes for a, b in pairwise(places))
    held = len(tier.contents)
    assert tier.num_records - held >= fewest_records(READERS, count)
    assert held >= least
    layers = Counter(layer for layer, _ in tier.contents)
    if not encoded:
        assert max(layers.values()) - min(layers[at] for at in range(store.num_layers)) <= 1
    assert set(layers) == set(range(store.num_layers))
    (sentence,) = (record.message for record in caplog.records if "on disk" in record.message)
    assert sentence.startswith(f"{held} of {count} experts are held in ")
    assert f"the other {count - held} stay on disk" in sentence
    # Others come through records, of which one is as good as another.
    records = expected(store)
    away = [key for key in records if key not in tier.contents]
    for at, key in enumerate(away[:3], start=tier.num_records - 3):
        assert tier.read(*key, tier.record(at)) > 0
        assert torch.equal(tier.record(at)[: tier.record_bytes(*key)], records[key])
    check_contents(tier, store)
    tier.close()


@pytest.mark.parametrize("encoded", [False, True])
def test_too_little_memory_says_how_much_more_is_needed(encoded: bool, opened: Opened) -> None:
    store = encoding(opened.store) if encoded else opened.store
    device = Locking()

    def tier_of(limit: int) -> HostTier:
        if isinstance(store, EncodingStore):
            return HostTier.encode(store, None, room(limit, device))
        return HostTier.load(store, room(limit, device))

    with pytest.raises(SpeqError, match="host_budget that is larger by") as caught:
        tier_of(ALIGNMENT)
    fewest = fewest_records(READERS, store.num_layers * store.num_experts)
    short = fewest * store.codec.slot_bytes - ALIGNMENT
    assert f"larger by {short} bytes" in str(caught.value)
    assert device.pinned == {}


def test_what_the_system_does_not_lock_is_said_once(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    device = Locking(granted=2)
    tier = HostTier.load(opened.store, room(1 << 30, device))
    check_contents(tier, opened.store)
    assert tier.pinned_bytes == sum(device.pinned.values()) == 2 * device.asked[0]
    (record,) = (r for r in caplog.records if "did not lock" in r.message)
    share = 100 * (1 - tier.pinned_bytes / tier.nbytes)
    assert f"({share:.0f} %)" in record.message and record.levelno == logging.WARNING
    tier.close()
    assert device.pinned == {}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("error", [SpeqError, OSError, KeyboardInterrupt])
def test_nothing_stays_locked_after_a_failure(
    error: type[BaseException], encoded: bool, opened: Opened
) -> None:
    plain = Counting(opened.store, failing=(1, 1), error=error)
    device = Locking()
    with pytest.raises(error, match="the disk is gone"):
        if encoded:
            HostTier.encode(encoding(plain), None, room(1 << 30, device))
        else:
            HostTier.load(plain, room(1 << 30, device))
    assert device.asked != [] and device.pinned == {}


@pytest.mark.parametrize("encoded", [False, True])
def test_an_interrupt_ends_reading_and_unlocks(encoded: bool, opened: Opened) -> None:
    """Ctrl-C strikes the caller's thread, here where it hears of progress."""
    plain = Counting(opened.store)
    device = Locking()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if encoded:
            HostTier.encode(encoding(plain), None, room(1 << 30, device), interrupt)
        else:
            HostTier.load(plain, room(1 << 30, device), interrupt)
    assert device.pinned == {}
    reads = plain.reads.total()
    gc.collect()
    assert plain.reads.total() == reads  # no thread goes on


def test_a_lock_that_fails_with_an_error_leaves_none(opened: Opened) -> None:
    device = Locking()
    pin = device.pin

    def pin_twice(memory: Tensor) -> bool:
        granted = pin(memory)
        if len(device.asked) == 2:
            raise RuntimeError("CUDA error: the device is lost")
        return granted

    device.pin = pin_twice  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is lost"):
        HostTier.load(opened.store, room(1 << 30, device))
    assert device.pinned == {}


def test_what_nobody_closes_is_unlocked_when_nobody_holds_it(opened: Opened) -> None:
    device = Locking()
    tier = HostTier.load(opened.store, room(1 << 30, device))
    assert device.pinned != {}
    del tier
    gc.collect()
    assert device.pinned == {}


def test_a_pass_does_each_once_and_begins_none_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = spread_by_layer(3, 5)
    assert keys[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)] and len(set(keys)) == 15
    done: list[tuple[int, int]] = []
    withdrawn = Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            withdrawn.set()
            super().shutdown(wait=wait)

    def work(layer: int, expert: int) -> None:
        if (layer, expert) == keys[1]:
            raise SpeqError("no")
        if (layer, expert) == keys[2]:
            withdrawn.wait()
        done.append((layer, expert))

    monkeypatch.setattr(passes, "ThreadPoolExecutor", Pool)
    with pytest.raises(SpeqError, match="no"):
        for_each_key(work, keys, threads=1)
    assert done == [keys[0], keys[2]]  # the last one had begun
    done.clear()
    for_each_key(work, keys[3:], threads=4)
    assert Counter(done) == Counter(keys[3:])


def test_an_arena_is_cut_into_whole_blocks() -> None:
    device = Locking()
    arena = PinnedArena(device, 5 * ALIGNMENT, chunk_bytes=2 * ALIGNMENT)
    taken = [arena.take(nbytes, 1 << 20) for nbytes in (1, ALIGNMENT, 2 * ALIGNMENT + 1, 1)]
    assert [None if one is None else len(one) for one in taken] == [
        1,
        ALIGNMENT,
        2 * ALIGNMENT + 1,
        None,
    ]
    assert device.asked == [2 * ALIGNMENT, 3 * ALIGNMENT] and arena.nbytes == 5 * ALIGNMENT
    small = PinnedArena(device, 1 << 20, chunk_bytes=1 << 19)
    assert small.take(1, expected_bytes=ALIGNMENT + 1) is not None
    assert small.nbytes == 2 * ALIGNMENT  # no more than is expected


@pytest.mark.parametrize("codec", ["raw", pytest.param("lossless", marks=pytest.mark.wide)])
def test_a_run_brings_experts_from_both(codec: str, tmp_path: Path) -> None:
    """The whole engine, on a device of the host's making."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 4}
    model = write_model(tmp_path / "model", "olmoe", torch.bfloat16, **sizes)
    expected_ids = greedy_tokens(load_plain(model), PROMPT, 6)
    with host_device() as device:
        generator = Generator.from_pretrained(
            model, "700KiB", device="cuda", codec=codec, draft_length=0, host_budget="700KiB"
        )
        made = generator.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
        run = generator.last_run
        generator.close()
    assert made.token_ids == expected_ids
    assert made.stats["codec"] == codec
    memory = made.stats["memory"]
    assert 0 < memory["host_pinned"] == memory["host_records"] <= 700 << 10
    assert run is not None
    moved = [e for step in run.steps for e in step.events if e.kind == "transfer"]
    assert {event.read_bytes > 0 for event in moved} == {True, False}  # some from disk, some not
    assert device.pinned == {}
