"""The bench of the link: what it counts, and what it compares."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import SpeqError
from speq.bench.machine import transfer
from speq.bench.machine.page_cache import cached_bytes
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.files.alignment import ALIGNMENT
from speq.measure import link
from speq.models.opened import open_model
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Priority
from tests.helpers.told import Told

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def packed(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened = open_model(tiny("olmoe"))
    assert isinstance(opened.store, SafetensorsExpertStore)
    path = tmp_path_factory.mktemp("transfer") / "packed"
    pack(opened.checkpoint, opened.store, path)
    opened.close()
    return path


class Ticking:
    """A clock that is two seconds further whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


@pytest.mark.parametrize("readers", [1, 3])
def test_plain_reads_count_whole_blocks(tmp_path: Path, readers: int) -> None:
    size = 2 * ALIGNMENT
    content = random.Random(8).randbytes(5 * size + 100)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / "a", tmp_path / "b"]
    arena = transfer.arena_for(readers, size)
    sample = transfer.plain_reads(paths, size, arena, readers, 7 * size, clock=Ticking())
    assert sample == transfer.LinkSample(7 * size, 7 * size, 2.0)
    # What lies in memory afterwards is a block of the file.
    blocks = [content[at : at + size] for at in range(0, 5 * size, size)]
    assert bytes(arena[0].tolist()) in blocks
    # No more than there is, however much is asked for.
    sample = transfer.plain_reads(paths, size, arena, readers, 10**9, clock=Ticking())
    assert sample.payload_bytes == 10 * size


def test_a_plain_read_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(SpeqError, match="is smaller than a read of 8 KiB"):
        transfer.plain_reads([tmp_path / "a"], 8192, transfer.arena_for(1, 8192), 1, 8192)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_expert_reads_bring_whole_records(kind: str, tiny: Folder, packed: Path) -> None:
    opened = open_model(tiny("olmoe") if kind == "plain" else packed)
    store = opened.store
    record_bytes = store.codec.record_bytes
    arena = transfer.arena_for(4, store.codec.slot_bytes)
    sample = transfer.expert_reads(store, arena, 2, 5 * record_bytes, seed=1)
    assert sample.payload_bytes == 5 * record_bytes
    assert sample.read_bytes >= sample.payload_bytes
    assert sample.seconds > 0
    # Every expert, so that the rows hold some of them, unchanged.
    everything = store.num_layers * store.num_experts * record_bytes
    sample = transfer.expert_reads(store, arena, 2, everything, seed=1)
    assert sample.payload_bytes == everything
    slot = transfer.arena_for(1, store.codec.slot_bytes)[0]
    records = set()
    for at in range(store.num_layers * store.num_experts):
        store.read(*divmod(at, store.num_experts), slot)
        records.add(bytes(slot[:record_bytes].tolist()))
    assert all(bytes(row[:record_bytes].tolist()) in records for row in arena)
    opened.close()


def test_the_link_by_size_ends_with_an_experts_own(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(packed)
    record_bytes = opened.store.codec.record_bytes
    # Half a second each: plain reads of all there is, and every expert once.
    monkeypatch.setattr(link, "READ_SIZES", (4096, 8192, 1 << 30))
    monkeypatch.setattr(
        link, "plain_reads", lambda _, size, *__, **___: link.LinkSample(size, 1, 0.5)
    )
    monkeypatch.setattr(
        link,
        "link_bytes_per_s",
        lambda store, slots, clock, nbytes, **__: nbytes * len(slots),
    )
    points = link.link_by_size(opened.store, 2)
    expert = (float(record_bytes), 2.0 * link.LINK_BYTES)
    assert points == ((4096.0, 8192.0), (8192.0, 16384.0), expert)
    assert link.long_link_bytes_per_s(opened.store, 3) == 3.0 * link.LINK_BYTES
    opened.close()


class OneAtATime:
    """A transfer engine whose first fetch takes long and whose others take 1, 2, 3, ... seconds."""

    def __init__(self) -> None:
        self.now, self.under_way, self.done = 0.0, 0, 0

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> None:
        self.under_way += 1
        assert (self.under_way, slot, priority) == (1, 0, Priority.DEMAND)

    def wait(self, ticket: None) -> None:
        self.now += self.done or 1000
        self.under_way, self.done = 0, self.done + 1

    def close(self) -> None:
        assert self.done == 1 + link.FIRST_FETCHES


def test_the_first_fetch_is_the_median_of_lone_ones(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, engine = open_model(packed), OneAtATime()
    monkeypatch.setattr(link, "_transfer_of", lambda *_: engine)
    assert link.first_fetch_s(opened.store, 1, clock=lambda: engine.now) == 8.5  # of 1 to 16
    opened.close()


def test_transfer_rows(tiny: Folder, packed: Path) -> None:
    settings = transfer.Settings(readers=[1, 2], sizes=["4KiB", "8KiB"], volume="64KiB", rounds=2)
    told = Told()
    report = transfer.run([str(tiny("olmoe")), str(packed)], settings, told)
    assert told.steps("reading") == 2
    kinds = [
        (row["store"], row["readers"], row["kind"], row["request_bytes"]) for row in report.rows
    ]
    record_bytes = open_model(packed).store.codec.record_bytes
    assert kinds == [
        (str(store), readers, kind, size)
        for store, experts in ((tiny("olmoe"), "safetensors"), (packed, "packed"))
        for readers in (1, 2)
        for kind, size in (
            ("plain reads", 4096),
            ("plain reads", 8192),
            (f"experts, {experts}", record_bytes),
        )
    ]
    for row in report.rows:
        assert row["read_gb_per_s"] >= row["gb_per_s"] > 0
        assert row["share"] > 0
        if (row["kind"], row["request_bytes"]) == ("plain reads", 8192):
            assert row["share"] == 1.0


def test_shares_compare_figures_of_one_round(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is twice as fast in every second round changes no share."""
    turns = iter(range(100))

    def plain(*_: Any, **__: Any) -> transfer.LinkSample:
        return transfer.LinkSample(1000, 1000, 2.0 ** -(next(turns) // 2 % 2))

    def experts(*_: Any, **__: Any) -> transfer.LinkSample:
        return transfer.LinkSample(800, 1000, 2.0 ** -(next(turns) // 2 % 2))

    monkeypatch.setattr(transfer, "plain_reads", plain)
    monkeypatch.setattr(transfer, "expert_reads", experts)
    settings = transfer.Settings(readers=[1], sizes=["8KiB"], volume="64KiB", rounds=6)
    plain_row, expert_row = transfer.run([str(packed)], settings).rows
    assert (plain_row["share"], expert_row["share"]) == (1.0, 0.8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"readers": [0]}, "readers is 0; it must be from 1 to 64"),
        ({"rounds": 0}, "rounds is 0"),
        ({"sizes": ["5000"]}, "size 5000 is no multiple of 4096 bytes"),
        ({"volume": "much"}, "memory size 'much' is not understood"),
    ],
)
def test_nonsense_is_refused(packed: Path, settings: dict[str, Any], message: str) -> None:
    given = {"readers": [1], "sizes": ["8KiB"], "volume": "64KiB", "rounds": 1} | settings
    with pytest.raises(SpeqError, match=message):
        transfer.run([str(packed)], transfer.Settings(**given))
    with pytest.raises(SpeqError, match="readers is 'a,1'; it must be whole numbers"):
        transfer.Settings(readers="a,1")  # type: ignore[arg-type]


def test_an_empty_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert cached_bytes(tmp_path / "empty") == 0


def test_the_arena_is_written_to_before_it_is_timed() -> None:
    arena = transfer.arena_for(2, 4096, 8192)
    assert arena.shape == (2, 8192)
    assert torch.equal(arena, torch.zeros(2, 8192, dtype=torch.uint8))
