"""The packed copy that a first run leaves in the cache folder, and that later runs read."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import speq
from speq import Generator
from speq.errors import CheckpointError, SpeqError
from speq.experts import packed_copy, record_writer
from speq.experts.copied_store import CopiedExperts
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.packed_copy import copy_folder
from speq.experts.packed_store import RECORDS_FILE, PackedExpertStore
from speq.files import kept
from speq.files.alone import FolderTaken, lock_folder
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST, Checkpoint
from speq.files.safetensors_file import SafetensorsFile
from speq.models.opened import open_model
from tests.helpers.copies import first_runs_hold
from tests.helpers.fp8_files import PUBLISHERS, write_fp8
from tests.helpers.full_disk import room_is
from tests.helpers.host_device import host_device
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = [5, 17, 40, 3, 22, 9]
BUDGET = "560KiB"
Folder = Callable[[str], Path]


@pytest.fixture
def model(tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that counts as large, for a user whose cache is empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_copy, "SPARE_SHARE", 0)  # however full the disk is
    with first_runs_hold(records=True):
        yield tiny_bfloat16("qwen2_moe")


def kept_at(model: Path) -> Path:
    checkpoint = Checkpoint(model)
    folder = copy_folder(checkpoint)
    checkpoint.close()
    assert folder is not None
    return folder


def loaded(model: Path, budget: str = BUDGET, **options: Any) -> Generator:
    return Generator.from_pretrained(model, budget, draft="none", **options)


def tokens(generator: Generator) -> list[int]:
    return generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids


def finish(generator: Generator) -> None:
    """Wait for the copy to end by itself."""
    copy = generator.runtime._loaded.copy
    assert copy is not None
    copy._thread.join()
    generator.close()


def made(model: Path) -> list[int]:
    """Run once, to the end of the copy."""
    generator = loaded(model)
    assert isinstance(generator.runtime.opened.store, EncodingStore)
    found = tokens(generator)
    finish(generator)
    return found


def test_later_runs_read_records_and_write_the_same(model: Path, tmp_path: Path) -> None:
    first = made(model)
    speq.pack(model, tmp_path / "packed", codec="lossless")
    folder = kept_at(model)
    assert (folder / RECORDS_FILE).read_bytes() == (tmp_path / "packed" / RECORDS_FILE).read_bytes()
    assert not (folder / EXPERTS_JOURNAL).exists()
    generator = loaded(model)
    assert isinstance(generator.runtime.opened.store, PackedExpertStore)
    assert generator.runtime.residency_plan.codec == "lossless"
    assert generator.runtime._loaded.copy is None
    assert tokens(generator) == first
    generator.close()


def test_codes_that_are_decoded_are_copied_as_records_of_their_words(
    model: Path, tmp_path: Path
) -> None:
    publisher = PUBLISHERS["squares of 32"]
    published = write_fp8(tmp_path / "fp8", tmp_path / "words", model, publisher=publisher)
    budget, given = "1400KiB", {"dtype": "float32"}
    generator = loaded(published, budget, **given)
    first = tokens(generator)
    finish(generator)
    assert first == greedy_tokens(load_plain(tmp_path / "words"), PROMPT, 12)
    generator = loaded(published, budget, **given)
    assert isinstance(generator.runtime.opened.store, CopiedExperts)
    assert tokens(generator) == first
    generator.close()
    speq.pack(tmp_path / "words", tmp_path / "packed", codec="lossless")
    records = (kept_at(published) / RECORDS_FILE, tmp_path / "packed" / RECORDS_FILE)
    assert records[0].read_bytes() == records[1].read_bytes()


def stop_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let copies be stopped once so many experts are done."""
    told = packed_copy.PackedCopy._report_progress

    def stopped(self: packed_copy.PackedCopy, done: int, total: int) -> None:
        if done == count:
            self._stopping = True
        told(self, done, total)

    patch.setattr(packed_copy.PackedCopy, "_report_progress", stopped)


def test_what_a_run_interrupts_the_next_one_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        made(model)
    folder = kept_at(model)
    assert not (folder / EXPERTS_MANIFEST).exists()
    assert len((folder / EXPERTS_JOURNAL).read_text().splitlines()) == 1 + 3
    begun = (folder / RECORDS_FILE).read_bytes()
    made(model)
    assert (folder / EXPERTS_MANIFEST).exists()
    assert (folder / RECORDS_FILE).read_bytes()[: len(begun)] == begun


def test_damaged_copy_is_said_and_made_anew(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = made(model)
    records = kept_at(model) / RECORDS_FILE
    whole = records.read_bytes()
    records.write_bytes(whole[:-4096])
    assert made(model) == first
    assert "has no usable copy of the experts" in caplog.text
    assert records.read_bytes() == whole


def test_full_disk_is_said(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_is(monkeypatch, 1 << 10)
    generator = loaded(model)
    assert generator.runtime._loaded.copy is None  # nor was it planned for one
    assert generator.runtime.residency_plan.copied_share == 0
    assert len(tokens(generator)) == 12
    generator.close()
    assert caplog.text.count("no packed copy of the experts is made: it takes") == 1
    assert list(kept_at(model).iterdir()) == []


@pytest.mark.parametrize(
    ("budget", "options"),
    [(BUDGET, {"packed_copy": "none"}), (BUDGET, {"codec": "raw"}), ("64MiB", {})],
)
def test_no_copy_where_none_is_wanted_or_needed(
    model: Path, budget: str, options: dict[str, Any]
) -> None:
    generator = loaded(model, budget, **options)
    assert generator.runtime._loaded.copy is None
    generator.close()
    assert not kept_at(model).exists()


@pytest.mark.parametrize("budget", ["64MiB", "1400KiB"], ids=["all", "some"])
def test_a_gpu_fills_its_hosts_memory_from_one(budget: str, model: Path) -> None:
    """The first run makes it, where records are what that memory holds; later ones read it."""
    expected = greedy_tokens(load_plain(model, torch.float32), PROMPT, 12)
    options = {"device": "cuda", "dtype": "float32"}
    with host_device():
        generator = loaded(model, budget, **options)
        plan = generator.runtime.residency_plan
        assert (plan.codec, plan.encoded) == ("lossless", True)
        assert tokens(generator) == expected
        finish(generator)
        assert (kept_at(model) / EXPERTS_MANIFEST).exists()
        generator = loaded(model, budget, **options)
        assert isinstance(generator.runtime.opened.store, CopiedExperts)
        assert generator.runtime._loaded.copy is None
        assert tokens(generator) == expected
        generator.close()
        generator = loaded(model, budget, verify_reads=True, **options)
        assert tokens(generator) == expected
        generator.close()
        with pytest.raises(CheckpointError, match="no checksums to verify reads by"):
            loaded(model, budget, verify_reads=True, packed_copy="none", **options)
        generator = loaded(model, budget, packed_copy="none", **options)
        assert not isinstance(generator.runtime.opened.store, CopiedExperts)
        generator.close()


def test_explicit_codec_reads_what_was_published(model: Path) -> None:
    first = made(model)
    generator = loaded(model, codec="raw")
    assert generator.runtime.opened.store.published
    assert tokens(generator) == first
    generator.close()


LOCKING = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[None]:
    """One that has locked the folder of a copy, as a run that writes it."""
    command = [sys.executable, "-c", LOCKING, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"locked\n"
        yield
        process.stdin.close()


@pytest.mark.parametrize("planned", [True, False], ids=["before loading", "while loading"])
def test_a_run_beside_another_that_writes_the_copy(
    planned: bool, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "speq")
    folder, begin = kept_at(model), packed_copy.PackedCopy.begin
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        if planned:
            stack.enter_context(another_process(folder))
            with pytest.raises(FolderTaken), lock_folder(folder, "taken"):
                pass

        def late(self: packed_copy.PackedCopy) -> None:
            stack.enter_context(another_process(folder))
            begin(self)

        monkeypatch.setattr(packed_copy.PackedCopy, "begin", late)
        generator = loaded(model, "960KiB", dtype="float32")
        plan = generator.runtime.residency_plan
        assert (plan.codec, plan.encoded) == ("lossless", True)
        assert plan.copied_share == (0.0 if planned else 0.5)
        assert tokens(generator) == greedy_tokens(load_plain(model, torch.float32), PROMPT, 12)
        generator.close()
        assert list(folder.iterdir()) == []
    assert caplog.text.count("another run writes to") == 1


def test_small_models_leave_no_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1 << 30)
    generator = loaded(model)
    generator.close()
    assert not kept_at(model).exists()


@pytest.mark.wide
def test_a_process_ends_in_the_midst_of_a_copy(model: Path, tmp_path: Path) -> None:
    """Without closing what it loaded; the copy goes on the next time."""
    script = (
        "import sys\n"
        "from speq import Generator\n"
        "from speq.experts import packed_copy\n"
        "packed_copy.LEAST_BYTES, packed_copy.SPARE_SHARE = 1, 0\n"
        f"generator = Generator.from_pretrained(sys.argv[1], {BUDGET!r}, draft='none')\n"
        "print(generator.generate([5, 17], max_new_tokens=1, ignore_eos=True).token_ids)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HOME": str(tmp_path / "home")},
    )
    assert ended.returncode == 0, ended.stderr
    assert "a packed copy is being made" in ended.stderr
    assert "terminate" not in ended.stderr


def test_it_rests_while_tokens_are_generated_and_only_then(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float | None] = []

    class Watched(threading.Event):
        """Notes how long it is waited for where it is not set, and waits no time."""

        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                rests.append(timeout)
            return self.is_set()

    generator = loaded(model, codec="raw")  # no measurement is to choose to encode
    checkpoint, store = generator.runtime.opened.checkpoint, generator.runtime.opened.store
    assert isinstance(store, SafetensorsExpertStore)
    copy = packed_copy.PackedCopy(checkpoint, store, kept_at(model))
    copy._alone = Watched()
    copy._alone.set()
    clock = iter([1.0, 2.0, 2.5, 5.0, 6.0, 7.0, 8.0, 9.0])  # an expert is done, the next begun
    monkeypatch.setattr(packed_copy.time, "perf_counter", clock.__next__)
    copy._report_progress(1, 4)
    assert rests == []
    with copy.giving_way():
        copy._report_progress(2, 4)
        copy._report_progress(3, 4)
    copy._report_progress(4, 4)
    assert rests == [9 * 0.5, 9 * 1.0]
    generator.close()


@pytest.fixture
def own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model in a folder of the test's own, where no change of weights changes the
    fingerprint, as few do in shards of gigabytes.
    """
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "the same")
    return Path(shutil.copytree(model, tmp_path / "own"))


def zero(model: Path, expert: str) -> None:
    """Let an expert's matrices be zero in a model's only shard."""
    with SafetensorsFile(model / "model.safetensors") as file:
        ranges = [
            (info.offset, info.nbytes) for name, info in file.tensors.items() if expert in name
        ]
    assert ranges
    with (model / "model.safetensors").open("r+b") as shard:
        for offset, nbytes in ranges:
            shard.seek(offset)
            shard.write(bytes(nbytes))


def published(model: Path) -> list[int]:
    """What the files themselves make of the prompt."""
    generator = loaded(model, packed_copy="none")
    found = tokens(generator)
    generator.close()
    return found


def read_from_copy(model: Path) -> list[int]:
    generator = loaded(model)
    assert isinstance(generator.runtime.opened.store, CopiedExperts)
    found = tokens(generator)
    generator.close()
    return found


def test_changed_weights_are_never_answered_with_the_old_ones(own: Path, tmp_path: Path) -> None:
    first = made(own)
    zero(own, ".mlp.experts.")
    now = published(own)
    assert now != first
    assert made(own) == now
    assert read_from_copy(own) == now
    speq.pack(own, tmp_path / "packed", codec="lossless")
    records = kept_at(own) / RECORDS_FILE
    assert records.read_bytes() == (tmp_path / "packed" / RECORDS_FILE).read_bytes()


def test_touched_files_are_compared_and_the_copy_stays(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(own)
    records = kept_at(own) / RECORDS_FILE
    inode = records.stat().st_ino
    shard = own / "model.safetensors"
    shard.write_bytes(shard.read_bytes())  # as a download of the same would
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert made(own) == first
    assert "were touched or replaced since their packed copy was made" in caplog.text
    read: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        compared = record_writer.PublishedWeights.crc32
        patch.setattr(
            record_writer.PublishedWeights,
            "crc32",
            lambda self, at: (read.append(at), compared(self, at))[1],
        )
        assert made(own) == first
    assert read[0] == 3  # where the last run was stopped
    assert read_from_copy(own) == first
    moved = tmp_path / "moved"
    own.rename(moved)
    assert made(moved) == first
    assert read_from_copy(moved) == first
    assert [each.model for each in kept.in_cache()] == [str(moved)]
    assert records.stat().st_ino == inode


def test_no_record_is_expected_of_a_copy_that_is_compared(own: Path) -> None:
    first = made(own)
    os.utime(own / "model.safetensors")
    generator = loaded(own)
    plan = generator.runtime.residency_plan
    assert (plan.codec, plan.encoded, plan.copied_share) == ("lossless", True, 0.0)
    assert tokens(generator) == first
    finish(generator)
    assert read_from_copy(own) == first


def test_a_copy_goes_on_with_the_weights_of_now(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        made(own)
    zero(own, "layers.0.mlp.experts.2.")
    made(own)
    speq.pack(own, tmp_path / "packed", codec="lossless")
    records = kept_at(own) / RECORDS_FILE
    assert records.read_bytes() == (tmp_path / "packed" / RECORDS_FILE).read_bytes()


def test_files_that_change_while_they_are_copied_leave_no_copy(
    own: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = packed_copy.PackedCopy._report_progress

    def changing(self: packed_copy.PackedCopy, done: int, total: int) -> None:
        if done == 3:
            zero(own, "layers.0.mlp.experts.0.")
        told(self, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(packed_copy.PackedCopy, "_report_progress", changing)
        made(own)
    assert not (kept_at(own) / EXPERTS_MANIFEST).exists()
    assert "were changed or replaced while they were read" in caplog.text
    made(own)
    assert read_from_copy(own) == published(own)


def test_damaged_records_are_read_from_the_model_and_mended(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(model)
    records = kept_at(model) / RECORDS_FILE
    whole = records.read_bytes()
    spoilt = bytearray(whole)
    for at in range(0, len(whole), 4096):
        spoilt[at + 9] ^= 0x5A
    with records.open("r+b") as file:
        file.write(spoilt)
    assert read_from_copy(model) == first
    assert "was read from the model, and mended" in caplog.text
    assert caplog.text.count("mended") == 1
    store = open_copy(model)
    slot = expert_slot(store)
    for at in range(store.num_layers * store.num_experts):
        store.read(*divmod(at, store.num_experts), slot)
    store.close()
    assert records.read_bytes() == whole


def open_copy(model: Path) -> CopiedExperts:
    opened = open_model(model)
    assert isinstance(opened.store, SafetensorsExpertStore)
    store = packed_copy.open_copy(opened.checkpoint, opened.shape.experts, opened.store)
    assert store is not None
    return store


def test_damaged_records_of_a_model_that_changed_are_refused(own: Path) -> None:
    made(own)
    store = open_copy(own)
    zero(own, "layers.0.mlp.experts.1.")
    with (kept_at(own) / RECORDS_FILE).open("r+b") as file:
        file.seek(store.manifest.records[1].offset)
        file.write(b"rot")
    slot = expert_slot(store)
    store.read(0, 0, slot)
    with pytest.raises(SpeqError, match="damaged record of expert 1 in MoE layer 0, and the model"):
        store.read(0, 1, slot)
    store.close()


def test_each_record_is_compared_once_or_at_every_read(model: Path) -> None:
    made(model)
    store = open_copy(model)
    slot = expert_slot(store)
    for _ in range(3):
        store.read(0, 2, slot)
    size = store.record_bytes(0, 2)
    assert store.verified.nbytes == size
    store.verify_reads = True
    for _ in range(3):
        store.read(0, 2, slot)
    assert store.verified.nbytes == 4 * size
    store.close()
    generator = loaded(model, verify_reads=True)
    stats = generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True).stats
    generator.close()
    assert stats["verified_bytes"] == stats["moved_bytes"] + stats["prefill_moved_bytes"] > 0


def test_a_copy_needs_room_for_its_rest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    with monkeypatch.context() as patch:
        stop_at(patch, 12)
        made(model)
    folder = kept_at(model)
    there = (folder / RECORDS_FILE).stat().st_size
    opened = open_model(model)
    assert isinstance(opened.store, SafetensorsExpertStore)
    copy = packed_copy.PackedCopy(opened.checkpoint, opened.store, folder)
    rest = copy.usual_bytes - there
    assert 0 < rest < copy.usual_bytes
    room_is(monkeypatch, rest - 1)
    assert not copy._has_room()
    room_is(monkeypatch, rest)
    copy.begin()
    copy.wait()
    assert (folder / EXPERTS_MANIFEST).exists()


def test_copies_of_what_a_folder_held_before_go(
    own: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(own)
    old = kept_at(own)
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "another")
    made(own)
    assert not old.exists()
    assert (kept_at(own) / EXPERTS_MANIFEST).exists()
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "a third one")
    made(model)  # of another folder
    assert len(list(kept.in_cache())) == 2
