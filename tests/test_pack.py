"""Packed models: the same experts, whole or refused, whenever packing was interrupted."""

import errno
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from speq import Generator, SpeqError
from speq.cli import app
from speq.experts import pack as pack_module
from speq.experts import record_writer
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.pack import pack
from speq.experts.packed_store import PackedExpertStore
from speq.measure import check
from speq.models.opened import Opened, open_model
from speq.quantizing.models import packing_of
from tests.killed import killed_at
from tests.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
PROMPT = [*range(40, 70)]


def records_of(model: Path) -> list[Tensor]:
    """Every expert's record, by the store that a model folder has."""
    opened = open_model(model)
    store = opened.store
    found = []
    for at in range(store.num_layers * store.num_experts):
        slot = expert_slot(store)
        store.read(*divmod(at, store.num_experts), slot)
        found.append(slot[: store.record_bytes(*divmod(at, store.num_experts))])
    opened.close()
    return found


def pack_to(
    model: Path,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
    codec: str = "raw",
    draft: str = "auto",
) -> Opened:
    """Pack a model and open the result."""
    opened = open_model(model)
    try:
        assert isinstance(opened.store, SafetensorsExpertStore)
        packing = packing_of(opened, codec, draft)
        try:
            pack(opened.checkpoint, opened.store, out, packing, progress)
        finally:
            if packing.draft is not None:
                packing.draft.close()
    finally:
        opened.close()
    return open_model(out)


def same(model: Path, packed: Path) -> bool:
    pairs = zip(records_of(model), records_of(packed), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_exact_out_of_a_pack(family: str, tiny: Folder, tmp_path: Path) -> None:
    expected = greedy_tokens(load_plain(tiny(family)), PROMPT, 40)
    pack_to(tiny(family), tmp_path / "packed").close()
    assert same(tiny(family), tmp_path / "packed")
    generator = Generator.from_pretrained(
        tmp_path / "packed", "3MiB", draft_length=3, dtype="float32", verify_reads=True
    )
    result = generator.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    generator.close()
    assert result.token_ids == expected
    assert result.stats["prefill_moved_bytes"] > 0


def test_records_are_aligned_and_checksummed(tiny: Folder, tmp_path: Path) -> None:
    """By plain reading of the files, without our own reader."""
    told: list[tuple[int, int]] = []
    opened = pack_to(
        tiny("qwen2_moe"), tmp_path / "packed", lambda done, total: told.append((done, total))
    )
    opened.close()
    manifest = json.loads((tmp_path / "packed" / "experts.json").read_text())
    data = (tmp_path / "packed" / "experts.bin").read_bytes()
    plain = records_of(tiny("qwen2_moe"))
    assert len(manifest["records"]) == len(plain) == told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == list(range(1, len(plain) + 1))
    for (offset, nbytes, crc32), record in zip(manifest["records"], plain, strict=True):
        assert offset % 4096 == 0
        stored = data[offset : offset + nbytes]
        assert stored == bytes(record.tolist())
        assert crc32 == zlib.crc32(stored)
    assert len(data) % 4096 == 0
    assert not (tmp_path / "packed" / "experts.journal").exists()


def test_shards_keep_all_but_experts(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "olmoe", dtype=torch.bfloat16, max_shard_size="40KB")
    opened = pack_to(source, tmp_path / "packed")
    plain = open_model(source)
    kept = {name for name in plain.checkpoint.tensors if ".experts." not in name}
    assert set(opened.checkpoint.tensors) == kept
    assert len(opened.checkpoint.files) > 2
    for name in kept:
        ours = opened.checkpoint.tensors[name][0].tensor(name)
        assert torch.equal(ours, plain.checkpoint.tensors[name][0].tensor(name))
    plain.close()
    opened.close()
    assert same(source, tmp_path / "packed")


MOMENTS = (
    (SafetensorsExpertStore, "read"),
    (record_writer, "crc32_of"),
    (record_writer, "bytes_of"),
    (pack_module, "copy_tensors"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "unlink"),
    (Path, "mkdir"),
)


def pack_and_die(model: Path, out: Path, at: int) -> bool:
    """Pack in a process of its own that is killed at a moment; whether it lived."""
    return killed_at(at, MOMENTS, lambda: pack_to(model, out))


def test_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing opens before all is there; what was journalled is not read again."""
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=2)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 100_000)  # some records a batch
    moments, lived = 0, False
    while not lived:
        moments += 1
        out = tmp_path / f"killed-{moments}"
        lived = pack_and_die(source, out, moments)
        if not lived and (out / "config.json").exists() and not (out / "experts.journal").exists():
            assert same(source, out)  # killed when all was done
        elif not lived:
            with pytest.raises(SpeqError):
                open_model(out)
            pack_to(source, out).close()
            assert same(source, out)
        shutil.rmtree(out)
    assert moments > 50


def test_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run gets a few records further, and goes on where the last one was."""
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=2)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    out = tmp_path / "packed"
    runs = 1
    while not pack_and_die(source, out, 25):
        runs += 1
        assert runs < 50
    assert runs >= 3
    assert same(source, out)


def test_what_is_journalled_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    reads: Counter[tuple[int, int]] = Counter()
    read = SafetensorsExpertStore.read

    def counted(store: Any, layer: int, expert: int, record: Tensor) -> None:
        reads[layer, expert] += 1
        if sum(reads.values()) == 10:
            raise KeyboardInterrupt
        read(store, layer, expert, record)

    monkeypatch.setattr(SafetensorsExpertStore, "read", counted)
    out = tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        pack_to(source, out)
    # What lies behind the journal's last whole line counts for nothing.
    with (out / "experts.journal").open("ab") as journal:
        journal.write(b"[36864, 12")
    with (out / "experts.bin").open("ab") as data:
        data.write(b"rubbish" * 1000)
    pack_to(source, out).close()
    assert set(reads.values()) == {1, 2}
    assert [key for key, count in reads.items() if count == 2] == [(1, 1)]
    monkeypatch.undo()
    assert same(source, out)


def test_records_lost_since_they_were_journalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=2)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    out = tmp_path / "packed"
    assert not pack_and_die(source, out, 30)
    size = (out / "experts.bin").stat().st_size
    os.truncate(out / "experts.bin", 4096)
    assert size > 4096
    with pytest.raises(SpeqError, match=r"is shorter than the .* bytes that were journalled"):
        pack_to(source, out)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 20_000)
    calls = 0
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpeqError, match="cannot be written: No space left on device; what was"):
        pack_to(source, tmp_path / "packed")
    pack_to(source, tmp_path / "packed").close()
    assert same(source, tmp_path / "packed")


class Usage(NamedTuple):
    total: int = 1 << 40
    used: int = 1 << 40
    free: int = 1 << 10


def test_a_disk_without_room(tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(SpeqError, match=r"packing takes .* and 1 KiB of disk are left at"):
        pack_to(tiny("olmoe"), tmp_path / "packed")


@pytest.fixture
def packed(tiny: Folder, tmp_path: Path) -> Path:
    pack_to(tiny("olmoe"), tmp_path / "packed").close()
    return tmp_path / "packed"


def test_a_flipped_bit_is_found_where_it_is_looked_for(packed: Path) -> None:
    """In the middle of the second expert of the second layer."""
    manifest = json.loads((packed / "experts.json").read_text())
    offset, nbytes, _ = manifest["records"][8 + 1]
    with (packed / "experts.bin").open("r+b") as file:
        file.seek(offset + nbytes // 2)
        byte = file.read(1)[0]
        file.seek(offset + nbytes // 2)
        file.write(bytes([byte ^ 4]))
    opened = open_model(packed, verify_reads=True)
    record = expert_slot(opened.store)
    opened.store.read(1, 0, record)
    with pytest.raises(SpeqError, match=f"expert 1 in MoE layer 1, {nbytes} bytes at {offset}"):
        opened.store.read(1, 1, record)
    opened.close()
    trusting = open_model(packed)
    trusting.store.read(1, 1, record)
    trusting.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "speq-experts-9"}, "has format 'speq-experts-9'; this version reads"),
        ({"records": 7}, "is damaged"),
        ({"records": [[0, 1]]}, "is damaged"),
        ({"records": [[0, 1, "x"]]}, "is damaged"),
        ({"records": []}, "has 0 records aligned to 4096"),
        ({"records": [[4096, 10, 1]]}, "puts a record of 10 bytes at 4096"),
        ({"alignment": 512}, "aligned to 512 bytes"),
        ({"num_experts": 9}, "it must have 27, aligned"),
        ({"hidden_size": -1}, "is damaged"),
        ({"hidden_size": 32}, r"holds hidden size, expert width, layers and experts \[32, 32, 3"),
        ({"codec": "magic"}, "has codec 'magic'"),
        ({"dtype": "F99"}, "dtype 'F99'"),
        ({"dtype": "F16"}, "has a record of 24576 bytes; raw experts of torch.float16 have 12288"),
    ],
)
def test_a_damaged_manifest_is_one_sentence(
    packed: Path, change: dict[str, Any], message: str
) -> None:
    path = packed / "experts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpeqError, match=message):
        open_model(packed)


def test_records_cut_short_or_gone(packed: Path) -> None:
    path = packed / "experts.bin"
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(SpeqError, match=f"has {size - 4096} bytes and its manifest says {size}"):
        open_model(packed)
    path.unlink()
    with pytest.raises(SpeqError, match=r"experts\.bin cannot be read: No such file"):
        open_model(packed)


def test_folders_that_are_taken(packed: Path, tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="packed is a model already"):
        pack_to(tiny("olmoe"), packed)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(SpeqError, match="other exists and holds other files"):
        pack_to(tiny("olmoe"), other)
    begun = tmp_path / "begun"
    begun.mkdir()
    source = {"source": "another", "codec": "raw", "draft": None}
    (begun / "experts.journal").write_text(json.dumps(source) + "\n")
    with pytest.raises(SpeqError, match="begun holds an unfinished pack of another model"):
        pack_to(tiny("olmoe"), begun)
    with pytest.raises(SpeqError, match="was not packed to the end; run the same `speq pack`"):
        open_model(begun)
    (begun / "experts.journal").write_text("nonsense")
    with pytest.raises(SpeqError, match="journal is damaged; remove"):
        pack_to(tiny("olmoe"), begun)


def test_verifying_wants_a_pack(tiny: Folder, packed: Path) -> None:
    with pytest.raises(SpeqError, match="has no checksums to verify reads by; `speq pack`"):
        open_model(tiny("olmoe"), verify_reads=True)
    opened = open_model(packed, verify_reads=True)
    assert isinstance(opened.store, PackedExpertStore)
    assert opened.store.verify_reads
    opened.close()


def test_the_command(tiny: Folder, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    done = CliRunner().invoke(app, ["pack", str(tiny("olmoe")), "--out", str(out)])
    assert done.exit_code == 0
    assert "24 experts, " in done.stdout
    assert same(tiny("olmoe"), out)
    again = CliRunner().invoke(app, ["pack", str(out), "--out", str(tmp_path / "more")])
    assert again.exit_code == 1
    assert "is packed already; give the one it was packed from" in str(again.exception)


def test_check_does_not_compare_with_half_a_model(packed: Path) -> None:
    """Plain transformers would make up the experts it does not find."""
    with pytest.raises(SpeqError, match="is packed, and plain transformers, to compare with"):
        check.run(str(packed), "64MiB", prompts=None, num_prompts=1, json_file=None, force=False)
