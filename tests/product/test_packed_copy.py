"""The packed copy that a first run leaves in the cache folder, and that later runs read."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import speq
from speq import Generator
from speq.experts import packed_copy, record_writer
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.packed_copy import Stopped, copy_folder, taken
from speq.experts.packed_store import RECORDS_FILE, PackedExpertStore
from speq.files.checkpoint import EXPERTS_JOURNAL, EXPERTS_MANIFEST, Checkpoint

PROMPT = [5, 17, 40, 3, 22, 9]
BUDGET = "560KiB"
Folder = Callable[[str], Path]


@pytest.fixture
def model(tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that counts as large, for a user whose cache is empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_copy, "SPARE_SHARE", 0)  # however full the disk is
    return tiny_bfloat16("qwen2_moe")


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
    assert generator.runtime.opened.store.published
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
    assert generator.runtime.holding.codec == "lossless"
    assert generator.runtime._loaded.copy is None
    assert tokens(generator) == first
    generator.close()


def test_what_a_run_interrupts_the_next_one_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    told = packed_copy.PackedCopy._told

    def stop_at_three(self: packed_copy.PackedCopy, done: int, total: int) -> None:
        if done == 3:
            self._stopping = True
        told(self, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(packed_copy.PackedCopy, "_told", stop_at_three)
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
    assert "holds no sound copy of the experts" in caplog.text
    assert records.read_bytes() == whole


class Usage(NamedTuple):
    total: int = 1 << 40
    used: int = 1 << 40
    free: int = 1 << 10


def test_full_disk_is_said(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    generator = loaded(model)
    assert len(tokens(generator)) == 12
    generator.close()
    assert "no packed copy of the experts is made: it takes" in caplog.text
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


def test_explicit_codec_reads_what_was_published(model: Path) -> None:
    first = made(model)
    generator = loaded(model, codec="raw")
    assert generator.runtime.opened.store.published
    assert tokens(generator) == first
    generator.close()


def test_two_runs_do_not_write_one_copy(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "speq")
    folder = kept_at(model)
    folder.mkdir(parents=True)
    with taken(folder):
        with pytest.raises(Stopped), taken(folder):
            pass
        finish(loaded(model))
        assert not (folder / EXPERTS_JOURNAL).exists()
    assert "0 of" in caplog.text


def test_small_models_leave_no_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1 << 30)
    generator = loaded(model)
    generator.close()
    assert not kept_at(model).exists()


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

    generator = loaded(model, packed_copy="none")
    checkpoint, store = generator.runtime.opened.checkpoint, generator.runtime.opened.store
    assert isinstance(store, SafetensorsExpertStore)
    copy = packed_copy.PackedCopy(checkpoint, store, kept_at(model))
    copy._alone = Watched()
    copy._alone.set()
    clock = iter([1.0, 2.0, 2.5, 5.0, 6.0, 7.0, 8.0, 9.0])  # an expert is done, the next begun
    monkeypatch.setattr(packed_copy.time, "perf_counter", clock.__next__)
    copy._told(1, 4)
    assert rests == []
    with copy.giving_way():
        copy._told(2, 4)
        copy._told(3, 4)
    copy._told(4, 4)
    assert rests == [9 * 0.5, 9 * 1.0]
    generator.close()
