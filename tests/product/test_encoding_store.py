"""Published experts, encoded as they are read; a first run, which makes a packed copy meanwhile."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speq import Generator
from speq.experts import encoding_store, packed_copy, record_writer
from speq.experts.copied_store import SOURCE_FILE
from speq.experts.encoding_store import EncodingStore, sampled_slot_bytes
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.packed_copy import PackedCopy, copy_folder
from speq.experts.packed_store import RECORDS_FILE
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST
from speq.models.opened import open_model
from tests.helpers.copies import first_runs_hold
from tests.helpers.tiny_models import greedy_tokens, load_plain

Folder = Callable[[str], Path]
PROMPT, LONG_PROMPT = [5, 17, 40, 3, 22, 9], [(7 * i * i + 3 * i) % 256 for i in range(64)]
BUDGET = "960KiB"


@pytest.fixture
def model(tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that counts as large, whose records are on disk one by one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_copy, "SPARE_SHARE", 0)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    with first_runs_hold(records=True):
        yield tiny_bfloat16("qwen2_moe")


class Copying:
    """A copy of a model, and the store of the run that makes it."""

    def __init__(self, model: Path) -> None:
        self.opened = open_model(model)
        words = self.opened.store
        assert isinstance(words, SafetensorsExpertStore)
        folder = copy_folder(self.opened.checkpoint)
        assert folder is not None
        self.copy, self.folder = PackedCopy(self.opened.checkpoint, words, folder), folder
        codec = self.copy.codec.with_slot_bytes(sampled_slot_bytes(words, self.copy.codec))
        self.store = EncodingStore(words, codec, self.copy)
        self.checks = 0
        # What the shards hold, read by another library.
        self.tensors = load_file(model / "model.safetensors")
        layers = {int(name.split(".")[2]) for name in self.tensors if ".experts." in name}
        self.layers = sorted(layers)

    def matrices(self, layer: int, expert: int) -> list[torch.Tensor]:
        name = f"model.layers.{self.layers[layer]}.mlp.experts.{expert}"
        gate, up, down = (
            self.tensors[f"{name}.{each}_proj.weight"] for each in ("gate", "up", "down")
        )
        return [torch.cat([gate, up]), down]

    def check(self) -> list[int]:
        """Compare every expert with the shards'. Return the bytes that each has moved."""
        slot = expert_slot(self.store)
        moved = []
        for layer in range(self.store.num_layers):
            for expert in range(self.store.num_experts):
                slot.fill_(0xA5)
                self.store.read(layer, expert, slot)
                found = self.store.codec.decode(slot)
                for mine, wanted in zip(found, self.matrices(layer, expert), strict=True):
                    assert np.array_equal(
                        mine.view(torch.int16).numpy(), wanted.view(torch.int16).numpy()
                    )
                moved.append(self.store.moved_bytes(layer, expert))
        return moved

    def check_some(self, done: int, total: int) -> None:
        """In place of `PackedCopy._report_progress`: compare after every fifth expert."""
        if done % 5 == 1:
            self.check()
            self.checks += 1

    @property
    def words_bytes(self) -> int:
        return sum(each.nbytes for each in self.matrices(0, 0))

    def close(self) -> None:
        self.copy.stop()
        self.store.close()
        self.copy.close()
        self.opened.close()


def test_records_are_read_as_soon_as_they_are_on_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Copying(model)
    count = made.copy.total
    assert made.check() == [made.words_bytes] * count
    seen: list[int] = []
    told = PackedCopy._report_progress

    def look(self: PackedCopy, done: int, total: int) -> None:
        """Between two experts: reads go on in other threads."""
        seen.append(sum(each < made.words_bytes for each in made.check()))
        told(self, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(PackedCopy, "_report_progress", look)
        made.copy.begin()
        made.copy.wait()
    assert seen == list(range(1, count + 1))
    sizes = made.check()
    assert sum(-(-size // 4096) * 4096 for size in sizes) == (
        (made.folder / RECORDS_FILE).stat().st_size
    )
    made.close()


def stopped_before_end(model: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> Copying:
    """A run that has ended when so many experts were left to copy."""

    def stopped(self: PackedCopy, done: int, total: int) -> None:
        if done == total - left:
            raise packed_copy.CopyStopped

    first = Copying(model)
    with monkeypatch.context() as patch:
        patch.setattr(PackedCopy, "_report_progress", stopped)
        first.copy.begin()
        first.copy.wait()
    first.close()
    return first


@pytest.mark.parametrize("which", [EXPERTS_JOURNAL, RECORDS_FILE])
def test_a_copy_that_was_cut_anywhere_is_read_and_goes_on(
    which: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stopped_before_end(model, monkeypatch, 2)
    kept = Path(shutil.move(first.folder, tmp_path / "kept"))
    size = (kept / which).stat().st_size
    draws = random.Random(3)
    for length in [0, 1, size - 1, size, *(draws.randrange(size) for _ in range(5))]:
        shutil.rmtree(first.folder, ignore_errors=True)
        shutil.copytree(kept, first.folder)
        os.truncate(first.folder / which, length)
        made = Copying(model)
        with monkeypatch.context() as patch:
            patch.setattr(PackedCopy, "_report_progress", made.check_some)
            made.copy.begin()
            made.copy.wait()
        assert made.checks > 3
        assert (made.folder / EXPERTS_MANIFEST).exists()
        assert max(made.check()) < made.words_bytes
        made.close()


def test_records_of_an_earlier_run_are_read_before_they_are_verified(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Copying(model)
    stopped_before_end(model, monkeypatch, made.copy.total - 7)
    records: list[int] = []

    def look(self: PackedCopy, done: int, total: int) -> None:
        records.append(sum(each < made.words_bytes for each in made.check()))
        raise packed_copy.CopyStopped

    monkeypatch.setattr(PackedCopy, "_report_progress", look)
    made.copy.begin()
    made.copy.wait()
    assert records == [7]
    made.close()


def test_damaged_records_are_encoded_from_the_model(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Copying(model)
    made.copy.begin()
    made.copy.wait()
    with (made.folder / RECORDS_FILE).open("r+b") as file:
        content = bytearray(file.read())
        for at in range(0, len(content), 4096):
            content[at + 9] ^= 0x5A
        file.seek(0)
        file.write(content)
    assert set(made.check()) == {made.words_bytes}
    os.truncate(made.folder / RECORDS_FILE, 0)
    assert set(made.check()) == {made.words_bytes}
    assert caplog.text.count("is read from the model: it is not what was written") == 1
    made.close()


def test_a_disk_that_is_full_stops_the_copy_alone(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = record_writer.RecordFiles.add

    def full(self: record_writer.RecordFiles, made: Any, disk: int) -> Any:
        if self._ends[disk] > 5 * 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(self, made, disk)

    monkeypatch.setattr(record_writer.RecordFiles, "add", full)
    made = Copying(model)
    made.copy.begin()
    made.copy.wait()
    assert "the packed copy of the experts is not finished" in caplog.text
    records = [each for each in made.check() if each < made.words_bytes]
    assert 0 < len(records) < made.copy.total
    made.close()


def loaded(model: Path, budget: str = BUDGET, **options: Any) -> Generator:
    given = {"draft": "none", "dtype": "float32", "profile": "none"} | options
    return Generator.from_pretrained(model, budget, **given)


def with_uneven(model: Path, experts: set[int], folder: Path) -> Path:
    """The model with some experts of each layer whose weights have all kinds of exponents."""
    shutil.copytree(model, folder)
    tensors, draws = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for name, words in tensors.items():
        if any(f".mlp.experts.{expert}." in name for expert in experts):
            exponents = torch.randint(-24, 1, words.shape, generator=draws)
            tensors[name] = words * exponents.float().exp2().bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["few rows", "many rows"])
@pytest.mark.parametrize("options", [{}, {"drafter": "cached", "draft_length": 3}], ids=str)
@pytest.mark.parametrize("uneven", [set(), {1, 2, 5}, {*range(1, 8)}], ids=len)
def test_first_runs_write_the_tokens_of_the_model(
    uneven: set[int],
    options: dict[str, Any],
    prompt: list[int],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where experts are larger than their slots, which are made for the first one."""
    monkeypatch.setattr(encoding_store, "LEAST_SAMPLED", 1)
    monkeypatch.setattr(encoding_store, "MOST_SAMPLED", 1)
    folder = with_uneven(model, uneven, tmp_path / "uneven")
    generator = loaded(folder, **options)
    store = generator.runtime.opened.store
    assert isinstance(store, EncodingStore)
    result = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert set().union(*store._wide) == uneven
    generator.close()
    assert result.token_ids == greedy_tokens(load_plain(folder, torch.float32), prompt, 24)
    assert caplog.text.count("is larger than the slots") == bool(uneven)


@pytest.mark.parametrize(
    ("codec", "budget"),
    [("lossless", BUDGET), ("residual", "1240KiB"), ("lossless", "64MiB"), ("residual", "64MiB")],
)
def test_runs_without_a_copy_write_the_tokens_of_the_model_too(
    codec: str, budget: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few experts alone the size is known before any is computed."""
    monkeypatch.setattr(encoding_store, "LEAST_SAMPLED", 1)
    monkeypatch.setattr(encoding_store, "MOST_SAMPLED", 1)
    folder = with_uneven(model, {1, 2, 5}, tmp_path / "uneven")
    reads: list[int] = []
    read = SafetensorsExpertStore.read

    def counted(
        self: SafetensorsExpertStore, layer: int, expert: int, slot: torch.Tensor, *arrived: Any
    ) -> int:
        reads.append(expert)
        return read(self, layer, expert, slot, *arrived)

    monkeypatch.setattr(SafetensorsExpertStore, "read", counted)
    options = {"codec": codec, "draft": "auto" if codec == "residual" else "none"}
    generator = loaded(folder, budget, context_length=96, **options)
    store, resident = generator.runtime.opened.store, generator.runtime.engine.offload.resident
    assert isinstance(store, EncodingStore) and resident.keeps_all == (budget == "64MiB")
    loading = len(reads)
    for prompt in (PROMPT, LONG_PROMPT):
        result = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
        assert result.token_ids == greedy_tokens(load_plain(folder, torch.float32), prompt, 24)
    generator.close()
    assert set().union(*store._wide) == {1, 2, 5}
    # The sample, and for residuals also the codes of a draft.
    assert loading == 1 + (codec == "residual") * store.num_layers * store.num_experts
    if resident.keeps_all:  # all others were read once
        once = [expert for expert in reads[loading:] if expert not in {1, 2, 5}]
        assert len(once) == len(set(once)) * store.num_layers


@pytest.mark.parametrize("drafter", [{}, {"drafter": "cached", "draft_length": 3}], ids=str)
def test_every_read_counts_those_of_experts_that_fit_no_slot_too(
    drafter: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_store, "LEAST_SAMPLED", 1)
    monkeypatch.setattr(encoding_store, "MOST_SAMPLED", 1)
    monkeypatch.setattr(PackedCopy, "begin", lambda self: None)
    generator = loaded(
        with_uneven(model, {1, 2, 5}, tmp_path / "uneven"), prefetch="none", **drafter
    )
    store, reads = generator.runtime.opened.store, list[tuple[int, int]]()
    assert isinstance(store, EncodingStore)
    read = SafetensorsExpertStore.read

    def counted(
        self: SafetensorsExpertStore, layer: int, expert: int, slot: torch.Tensor, *arrived: Any
    ) -> int:
        reads.append((expert, read(self, layer, expert, slot, *arrived)))
        return reads[-1][1]

    monkeypatch.setattr(SafetensorsExpertStore, "read", counted)
    stats = generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True).stats
    generator.close()
    assert sum(expert in {1, 2, 5} for expert, _ in reads) > 12
    words_bytes = store.words.codec.shape.nbytes
    assert stats["prefill_moved_bytes"] + stats["moved_bytes"] == len(reads) * words_bytes
    assert stats["prefill_read_bytes"] + stats["read_bytes"] == sum(read for _, read in reads)
    demanded = sum(layer["demand_bytes"] for layer in stats["layers"])
    assert demanded == stats["moved_bytes"] - stats["ahead_bytes"]
    assert stats["stall_s"] > 0


class Steps:
    """Lets the thread of a copy write one expert after the other, when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.freely = False
        monkeypatch.setattr(PackedCopy, "_report_progress", self._report)

    def _report(self, done: int, total: int) -> None:
        self._done.release()
        if not self.freely:
            self._go.acquire()

    def await_one(self) -> None:
        """Return when one more is on disk; the next one is not begun."""
        self._done.acquire()

    def go_on(self, freely: bool = False) -> None:
        self.freely = freely
        self._go.release()


@pytest.mark.parametrize("options", [{}, {"drafter": "cached", "draft_length": 3}], ids=str)
@pytest.mark.parametrize("what", ["budgets", "files"])
def test_changes_while_it_is_copied_leave_tokens_as_they_are(
    what: str,
    options: dict[str, Any],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other budgets, or files that are touched, or replaced by the same."""
    folder = Path(shutil.copytree(model, tmp_path / "own"))
    shard, draws = folder / "model.safetensors", random.Random(5)
    wanted = greedy_tokens(load_plain(folder, torch.float32), PROMPT, 12)
    steps = Steps(monkeypatch)
    generator = loaded(folder, **options)
    store, copy = generator.runtime.opened.store, generator.runtime._loaded.copy
    assert isinstance(store, EncodingStore) and copy is not None
    least = generator.runtime.least_budget
    slots = set()
    for at in range(8):
        steps.await_one()
        if what == "budgets":
            generator.resize(least + draws.randrange(10) * store.codec.slot_bytes)
        elif at == 3:
            os.utime(shard)
        elif at == 5:
            shutil.copy(shard, tmp_path / "same")
            (tmp_path / "same").replace(shard)
        assert generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == wanted
        slots.add(generator.runtime.plan.slots)
        steps.go_on(freely=at == 7)
    copy.wait()
    assert generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == wanted
    generator.close()
    assert (len(slots) > 3) == (what == "budgets")
    whole = (copy.folder / EXPERTS_MANIFEST).exists()
    assert whole == (what == "budgets")
    assert caplog.text.count("were changed or replaced while they were read") == (not whole)
    assert {each.name for each in copy.folder.iterdir()} <= {
        *(RECORDS_FILE, SOURCE_FILE, EXPERTS_MANIFEST if whole else EXPERTS_JOURNAL)
    }


def test_records_are_compared_at_every_read(model: Path) -> None:
    made = Copying(model)
    made.check()
    assert made.store.verified.nbytes == 0
    made.copy.begin()
    made.copy.wait()
    assert sum(made.check() + made.check()) == made.store.verified.nbytes
    made.close()


def test_words_as_published_are_held_where_that_is_faster(model: Path) -> None:
    with first_runs_hold(records=False):
        generator = loaded(model)
    assert generator.runtime.opened.store.published
    assert generator.runtime._loaded.copy is not None
    plain = generator.runtime.plan.items["slots"] / generator.runtime.plan.slots
    generator.close()
    shutil.rmtree(Path.home() / ".cache" / "speq")
    generator = loaded(model)
    assert generator.runtime.residency_plan.codec == "lossless"
    assert generator.runtime.plan.items["slots"] / generator.runtime.plan.slots < 0.9 * plain
    generator.close()


def test_a_file_that_cannot_be_cut_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[BinaryIO] = []
    path_open = Path.open

    class Uncut:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def __enter__(self) -> "Uncut":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def truncate(self, end: int) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def opening(self: Path, mode: str) -> Uncut:
        opened.append(path_open(self, mode))
        return Uncut(opened[-1])

    monkeypatch.setattr(Path, "open", opening)
    with pytest.raises(OSError, match="Input/output error"):
        record_writer.open_at(tmp_path / "records", 0)
    assert [each.closed for each in opened] == [True]
