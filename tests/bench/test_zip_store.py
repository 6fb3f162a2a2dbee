"""Experts compressed as ZipMoE has them: the file, what fills slots, and what is refused."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from speq.bench.rivals import zip_file
from speq.bench.rivals.zip_file import DATA_FILE, INDEX_FILE, ZipFile, ensure_file
from speq.bench.rivals.zip_store import ZipStore
from speq.errors import SpeqError
from speq.experts.expert_store import expert_slot
from speq.experts.pack import pack
from speq.files.alignment import ALIGNMENT, align
from speq.models.opened import Opened, open_model
from tests.helpers.tiny_models import write_model

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose experts have two chunks, the second of few words."""
    pytest.importorskip("zstandard")
    patch = pytest.MonkeyPatch()
    for module in ("zip_file", "zip_planes"):
        patch.setattr(f"speq.bench.rivals.{module}.CHUNK_WORDS", 5000)
    path = write_model(tmp_path_factory.mktemp("zip") / "model", "qwen3_moe", torch.bfloat16)
    with closing(open_model(path)) as opened:
        assert opened.store.codec.shape.weights == 6144
        yield opened
    patch.undo()


@pytest.fixture(scope="module")
def folder(opened: Opened, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zip") / "made"
    told: list[tuple[int, int]] = []
    progress = lambda done, total: told.append((done, total))  # noqa: E731
    ensure_file(opened.store, "source", folder, 2, progress)
    assert told == [(at, 24) for at in range(1, 25)]
    return folder


def store_in(folder: Path, opened: Opened, pool_bytes: int = 0) -> ZipStore:
    return ZipStore(opened.store, folder, pool_bytes, 2)


def record_of(opened: Opened, layer: int, expert: int) -> bytes:
    slot = expert_slot(opened.store)
    opened.store.read(layer, expert, slot)
    return bytes(slot[: opened.store.codec.record_bytes].numpy())


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in (INDEX_FILE, DATA_FILE):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


@pytest.mark.parametrize("cells", [0, 3, 1000])
def test_words_are_the_published_ones(opened: Opened, folder: Path, cells: int) -> None:
    """In whatever order; read from the file once and again, or found in the pool."""
    pool_bytes = cells * ZipFile(folder).cell_bytes + ALIGNMENT
    choose = random.Random(cells)
    keys = [(layer, expert) for layer in range(3) for expert in range(8)]
    order = [*keys, *choose.choices(keys, k=60)]
    with closing(store_in(folder, opened, pool_bytes)) as store:
        kept = min(cells, 24)
        assert store.pool_bytes == (kept and kept * store.file.cell_bytes + ALIGNMENT)
        assert len(store.pool.free) == kept
        slot = expert_slot(store)
        asked: set[tuple[int, int]] = set()
        found_bytes = 0
        for key in order:
            held = key in store.pool.keys
            slot.fill_(0xA5)
            read_bytes = store.read(*key, slot)
            assert bytes(slot[: store.codec.record_bytes].numpy()) == record_of(opened, *key)
            record = store.file.records[key[0] * 8 + key[1]]
            assert read_bytes == (0 if held else align(record.nbytes))
            assert store.moved_bytes(*key) == record.nbytes < store.record_bytes(*key)
            assert len(store.pool.keys) + len(store.pool.free) == kept
            assert held == (key in asked) or cells != 1000
            asked.add(key)
            found_bytes += record.nbytes * held
        assert (found_bytes > 0) == (cells > 0)


def test_threads_read_at_the_same_time(opened: Opened, folder: Path) -> None:
    keys = [(layer, expert) for layer in range(3) for expert in range(8)] * 6
    random.Random(1).shuffle(keys)
    with closing(store_in(folder, opened, 5 * ZipFile(folder).cell_bytes + ALIGNMENT)) as store:

        def read(key: tuple[int, int]) -> bool:
            slot = expert_slot(store)
            store.read(*key, slot)
            return bytes(slot[: store.codec.record_bytes].numpy()) == record_of(opened, *key)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, keys))
        assert len(store.pool.keys) + len(store.pool.free) == 5


def test_what_a_plan_is_told(opened: Opened, folder: Path) -> None:
    with closing(store_in(folder, opened)) as store:
        assert store.codec == opened.store.codec
        assert not store.published
        largest = max(record.nbytes for record in store.file.records)
        assert store.reading_bytes > align(largest) + ALIGNMENT
        assert store.files == (folder / DATA_FILE,)
        assert sum(store.moved_bytes(*divmod(at, 8)) for at in range(24)) == store.file.record_bytes


def test_the_file_is_written_once_for_each_model(
    opened: Opened, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = copied(folder, tmp_path / "here")
    before = (here / DATA_FILE).stat().st_ino
    ensure_file(opened.store, "source", here, 1)
    assert (here / DATA_FILE).stat().st_ino == before
    ensure_file(opened.store, "another", here, 1)
    assert (here / DATA_FILE).stat().st_ino != before
    assert (here / DATA_FILE).read_bytes() == (folder / DATA_FILE).read_bytes()
    # An earlier version's is written again, too.
    monkeypatch.setattr(zip_file, "FORMAT", "speq-zipmoe-2")
    assert zip_file.read_index(here / INDEX_FILE) == {}
    ensure_file(opened.store, "another", here, 1)
    assert zip_file.read_index(here / INDEX_FILE)["format"] == "speq-zipmoe-2"


def test_an_interruption_leaves_nothing_that_counts(opened: Opened, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_file(opened.store, "source", tmp_path, 2, interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_damaged_expert_is_refused(
    opened: Opened, folder: Path, tmp_path: Path, share: float
) -> None:
    here = copied(folder, tmp_path / "here")
    record = ZipFile(here).records[11]
    content = bytearray((here / DATA_FILE).read_bytes())
    content[record.offset + int(share * record.nbytes)] ^= 1
    (here / DATA_FILE).write_bytes(content)
    with closing(store_in(here, opened, 1 << 20)) as store:
        slot = expert_slot(store)
        store.read(1, 2, slot)
        for _ in range(2):
            with pytest.raises(
                SpeqError, match=r"expert 3 in MoE layer 1, .* run again"
            ) as refused:
                store.read(1, 3, slot)
            assert "\n" not in str(refused.value)
        assert (1, 3) not in store.pool.keys


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda here: (here / DATA_FILE).write_bytes(b"\0" * 4096), "has 4096 bytes and its index"),
        (lambda here: (here / DATA_FILE).unlink(), "No such file|does not exist|cannot be read"),
        (lambda here: (here / INDEX_FILE).write_text("{"), "is not valid JSON.* run again"),
        (lambda here: changed(here / INDEX_FILE), "is not what was written; remove it"),
    ],
    ids=["cut", "gone", "no JSON", "changed"],
)
def test_a_damaged_folder_is_refused(
    opened: Opened, folder: Path, tmp_path: Path, damage: Callable[[Path], Any], sentence: str
) -> None:
    here = copied(folder, tmp_path / "here")
    damage(here)
    with pytest.raises(SpeqError, match=sentence) as refused:
        store_in(here, opened)
    assert "\n" not in str(refused.value)


def changed(index: Path) -> None:
    entries = json.loads(index.read_text())
    entries["records"][3][1] += 1
    index.write_text(json.dumps(entries))


def test_other_experts_are_refused(tiny: Folder, tmp_path: Path) -> None:
    with closing(open_model(tiny("qwen3_moe"))) as opened:
        pack(opened.checkpoint, opened.store, tmp_path / "packed")
        with pytest.raises(SpeqError, match=r"words of bfloat16 .* experts are float32"):
            ensure_file(opened.store, "source", tmp_path, 1)
    refused = pytest.raises(SpeqError, match="the model is packed; give the folder")
    with closing(open_model(tmp_path / "packed")) as opened, refused:
        ensure_file(opened.store, "source", tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
