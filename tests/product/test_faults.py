"""Disks that fail, reads that come short, runs that are given up: a clear end, and nothing lost."""

import errno
import gc
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speq import Generator, SpeqError
from speq.bench.machine.page_cache import cached_bytes, drop
from speq.engine.offload import fetch_from
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore
from speq.experts.pack import pack
from speq.models.opened import open_model
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Fetch, Priority
from tests.helpers.direct_reads import reads_directly
from tests.helpers.open_files import open_files
from tests.helpers.tiny_models import greedy_tokens, load_plain

Folder = Callable[[str], Path]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(64)]
NEW_TOKENS = 24
PATIENCE_S = 60
# A few slots of many: experts are read all along.
SCARCE = 960 << 10


@pytest.fixture(scope="module", params=["plain", "packed"])
def model(
    request: pytest.FixtureRequest, tiny: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "plain":
        return tiny("qwen3_moe")
    opened = open_model(tiny("qwen3_moe"))
    assert isinstance(opened.store, SafetensorsExpertStore)
    path = tmp_path_factory.mktemp("faults") / "packed"
    pack(opened.checkpoint, opened.store, path)
    opened.close()
    return path


@pytest.fixture(scope="module")
def expected(tiny: Folder) -> list[int]:
    return greedy_tokens(load_plain(tiny("qwen3_moe")), PROMPT, NEW_TOKENS)


@pytest.fixture
def generator(model: Path) -> Iterator[Generator]:
    made = Generator.from_pretrained(model, SCARCE, draft="none", dtype="float32")
    assert made.runtime.plan.slots < 12
    yield made
    made.close()


def tokens(generator: Generator) -> list[int]:
    return generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("speq-reader")}


@pytest.mark.parametrize("fails_at", [1, 2, 7, 40, 150])
def test_a_read_that_fails_is_one_clear_error(
    generator: Generator, expected: list[int], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    really_read, number = os.preadv, itertools.count(1)  # of which threads take one each

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if next(number) == fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    try:
        # One that was read ahead of its need is asked for again, and nothing was lost.
        assert tokens(generator) == expected
    except SpeqError as error:
        assert re.fullmatch(
            r"reading \d+ bytes at \d+ of \S+ failed: Input/output error; check the disk and "
            r"run again",
            str(error),
        )
    assert next(number) > fails_at
    assert tokens(generator) == expected


def test_a_disk_that_is_gone_is_an_error(
    generator: Generator, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", read)
        for _ in range(3):
            with pytest.raises(SpeqError, match="Input/output error"):
                tokens(generator)
    assert tokens(generator) == expected


def test_reads_that_come_short_are_completed(
    generator: Generator, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    really_read = os.preadv
    cut = 0

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal cut
        brought = really_read(descriptor, buffers, offset)
        if brought <= 4096:
            return brought
        cut += 1
        return (brought - 1) // 4096 * 4096

    monkeypatch.setattr(os, "preadv", read)
    assert tokens(generator) == expected
    assert cut > 0


class Held:
    """Reads that wait until they are let go."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.begun = threading.Semaphore(0)
        self.ended = 0
        self.let_go = threading.Event()

    def __call__(self, key: ExpertKey, slot: Tensor) -> int:
        self.begun.release()
        assert self.let_go.wait(PATIENCE_S)
        read_bytes = self._fetch(key, slot)
        self.ended += 1
        return read_bytes


def test_closing_waits_for_what_is_under_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Held] = []

    def fetch(store: ExpertStore) -> Fetch:
        held.append(Held(fetch_from(store)))
        return held[-1]

    gc.collect()
    before, threads_before = open_files(model), readers()
    monkeypatch.setattr("speq.engine_layout.fetch_from", fetch)
    made = Generator.from_pretrained(model, SCARCE, draft="none", reader_threads=2)
    loader = made.runtime.engine.offload.loader
    for expert in range(3):
        assert loader.load(ExpertKey(expert, 0), Priority.DEMAND)
    reads = held[-1]
    for _ in range(2):
        assert reads.begun.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=made.close)
    closing.start()
    # Memory that is still written to must not be given back before the reads end.
    assert made.runtime.engine.offload.slots.untyped_storage().nbytes() > 0
    assert reads.ended == 0
    reads.let_go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert reads.ended == 2  # the third had not begun, and never did
    assert made.runtime.engine.offload.slots.untyped_storage().nbytes() == 0
    assert readers() == threads_before
    assert open_files(model) == before


@pytest.mark.wide
def test_generations_given_up_in_the_middle_lose_nothing(
    model: Path, generator: Generator, expected: list[int]
) -> None:
    assert tokens(generator) == expected
    gc.collect()
    before, readers_before = open_files(model), len(readers())
    for turn in range(200):
        stream = generator.stream(PROMPT[: 1 + turn % 64], max_new_tokens=30, ignore_eos=True)
        for _ in range(turn % 5):
            next(stream)
        if turn % 2:
            stream.close()
        else:
            del stream  # as an abandoned loop leaves it
    loader = generator.runtime.engine.offload.loader
    cache = loader.cache
    assert cache.free_slots + len(cache) + loader.under_way == cache.num_slots
    assert tokens(generator) == expected
    assert len(readers()) == readers_before
    assert open_files(model) == before


@pytest.mark.wide
def test_generators_that_are_dropped_leave_nothing(model: Path) -> None:
    gc.collect()
    before, threads_before = open_files(model), readers()
    for turn in range(6):
        made = Generator.from_pretrained(model, SCARCE, draft="none")
        next(made.stream(PROMPT, max_new_tokens=3))
        if turn % 2:
            made.close()
        del made
        gc.collect()
    for reader in readers() - threads_before:
        reader.join(PATIENCE_S)
    assert readers() == threads_before
    assert open_files(model) == before


def test_the_page_cache_does_not_serve_as_a_cache(model: Path) -> None:
    opened = open_model(model)
    names = {"experts.bin"} & {file.name for file in model.iterdir()}
    names |= {file.path.name for file in opened.checkpoint.files.values()}
    opened.close()
    if not all(reads_directly(file.path) for file in opened.checkpoint.files.values()):
        pytest.skip("no direct reads here")
    made = Generator.from_pretrained(model, SCARCE, draft="none", dtype="float32")
    for name in names:
        drop(model / name)
    before = {name: cached_bytes(model / name) for name in names}
    stats = made.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).stats
    made.close()
    assert stats["moved_bytes"] > 0
    assert {name: cached_bytes(model / name) for name in names} == before
