"""The first run of a published model: experts in lossless slots while a packed copy is made."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speq import Generator
from speq.experts import copying_store, packed_copy, record_writer
from speq.experts.copying_store import CopyingStore, copied_slot_bytes
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
        codec = self.copy.codec.with_slot_bytes(copied_slot_bytes(words, self.copy.codec))
        self.store = CopyingStore(words, codec, self.copy)
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


def loaded(model: Path, **options: Any) -> Generator:
    given = {"draft": "none", "dtype": "float32", "profile": "none"} | options
    return Generator.from_pretrained(model, BUDGET, **given)


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
    monkeypatch.setattr(copying_store, "LEAST_SAMPLED", 1)
    monkeypatch.setattr(copying_store, "MOST_SAMPLED", 1)
    folder = with_uneven(model, uneven, tmp_path / "uneven")
    generator = loaded(folder, **options)
    store = generator.runtime.opened.store
    assert isinstance(store, CopyingStore)
    result = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert set().union(*store._wide) == uneven
    generator.close()
    assert result.token_ids == greedy_tokens(load_plain(folder, torch.float32), prompt, 24)
    assert caplog.text.count("is larger than the slots") == bool(uneven)


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
