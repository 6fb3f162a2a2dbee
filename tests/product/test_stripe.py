"""A pack whose experts are divided between two disks: by their speed, whole or refused."""

import errno
import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from speq import Generator, SpeqError, pack
from speq.experts import record_writer, striped_records
from speq.experts.expert_store import expert_slot
from speq.experts.packed_store import RECORDS_FILE, Manifest, Record
from speq.experts.record_writer import EncodedExpert, RecordFiles
from speq.experts.striped_records import STRIPE_FILE, disk_of, measured_rates, share_of
from speq.files.checksums import seal
from speq.models.opened import open_model
from tests.helpers.command import Command
from tests.helpers.damage import flip_byte
from tests.helpers.killed import killed_at
from tests.helpers.packing import MOMENTS, same
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
PROMPT = [5, 6, 7, 8]
RATES = [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (20.0, 1.0), (1.0, 0.0)]


@pytest.mark.parametrize("rates", RATES)
def test_each_layer_is_divided_by_speed(rates: tuple[float, float]) -> None:
    share, layers, experts = share_of(rates), 48, 128
    wanted = rates[1] / sum(rates)
    for layer in range(layers):
        there = [disk_of(layer * experts + expert, share) for expert in range(experts)]
        assert set(there) <= {0, 1}
        for start in range(0, experts, 16):  # spread: also of each run of neighbours
            assert abs(sum(there[start : start + 16]) - 16 * wanted) <= 1.05
    all_there = sum(disk_of(at, share) for at in range(layers * experts))
    assert all_there == pytest.approx(layers * experts * wanted, abs=layers * experts / 1000)


def seconds(
    rates: tuple[float, float], disk: Callable[[int], int], chosen: list[list[int]]
) -> float:
    """Time of simulated disks that carry reads of one byte out in turn, layer by layer."""
    now_s = 0.0
    for experts in chosen:
        ends = [now_s, now_s]
        for at in experts:
            ends[disk(at)] += 1 / rates[disk(at)]
        now_s = max(ends)
    return now_s


@pytest.mark.parametrize("rates", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_simulated_disks_read_at_once(rates: tuple[float, float]) -> None:
    """All experts of a layer come as fast as both disks together read. Of few that a token wants,
    one disk may have more than its share: still sooner than from the faster one alone, or from
    halves.
    """
    share, rng = share_of(rates), random.Random(2)

    def divided(at: int) -> int:
        return disk_of(at, share)

    layers = [range(64 * layer, 64 * (layer + 1)) for layer in range(300)]
    whole = [[*layer] for layer in layers]
    assert seconds(rates, divided, whole) < 1.06 * 64 * len(layers) / sum(rates)
    few = [rng.sample(layer, 8) for layer in layers]
    taken = seconds(rates, divided, few)
    assert taken < 8 * len(few) / max(rates)
    assert taken <= seconds(rates, lambda at: at % 2, few)


def test_rates_are_those_of_reads_of_each_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    found = measured_rates(folders, 100_000)
    assert min(found) > 0 and [[*each.iterdir()] for each in folders] == [[], []]
    assert caplog.text.count("is on the same disk as the pack") == 1
    asked = []

    def read(folder: Path, nbytes: int, size: int, readers: int) -> float:
        asked.append((folder, nbytes, size, readers))
        return {"a": 3e9, "b": 1e9}[folder.name]

    monkeypatch.setattr(striped_records, "bytes_per_s_of", read)
    assert share_of(measured_rates(folders, 1 << 40)) == 250
    assert [(each[1], each[2]) for each in asked] == [(256 << 20, 4 << 20)] * 2


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is measured of the disks."""
    found = [2e9, 1e9]
    monkeypatch.setattr("speq.experts.pack.measured_rates", lambda *_: found)
    return found


@pytest.fixture
def striped(tiny: Folder, tmp_path: Path, rates: list[float]) -> tuple[Path, Path, Path]:
    """A model, its pack, and the stripe's folder."""
    model = tiny("olmoe")
    pack(model, tmp_path / "pack", codec="raw", stripe=tmp_path / "other")
    return model, tmp_path / "pack", tmp_path / "other"


def load(folder: Path, **options: Any) -> Generator:
    options = {"dtype": "float32", "draft": "none", "profile": "none"} | options
    return Generator.from_pretrained(folder, "20MiB", **options)


def generate(folder: Path, **options: Any) -> list[int]:
    generator = load(folder, **options)
    try:
        return generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
    finally:
        generator.close()


@pytest.mark.parametrize("share", RATES)
def test_output_is_exact_out_of_two_disks(
    share: tuple[float, float], tiny: Folder, tmp_path: Path, rates: list[float]
) -> None:
    rates[:] = share
    model = tiny("qwen3_moe")
    pack(model, tmp_path / "pack", codec="raw", stripe=tmp_path / "other")
    assert generate(tmp_path / "pack") == greedy_tokens(load_plain(model), PROMPT, 24)


@pytest.mark.parametrize("codec", ["lossless", "residual"])
def test_compact_records_are_divided(
    codec: str, tiny_bfloat16: Folder, tmp_path: Path, rates: list[float]
) -> None:
    model = tiny_bfloat16("olmoe")
    pack(model, tmp_path / "whole", codec=codec)
    pack(model, tmp_path / "pack", codec=codec, stripe=tmp_path / "other")
    stores = [open_model(tmp_path / name) for name in ("whole", "pack")]
    whole, divided = (opened.store for opened in stores)
    slots = [expert_slot(whole), expert_slot(divided)]
    for at in range(whole.num_layers * whole.num_experts):
        key = divmod(at, whole.num_experts)
        for store, slot in zip((whole, divided), slots, strict=True):
            store.read(*key, slot)
        nbytes = whole.record_bytes(*key)
        assert divided.record_bytes(*key) == nbytes
        assert torch.equal(slots[0][:nbytes], slots[1][:nbytes])
    for opened in stores:
        opened.close()
    made = [
        generate(tmp_path / name, dtype="auto", draft="auto", draft_length=3)
        for name in ("whole", "pack")
    ]
    assert made[0] == made[1]


def test_each_record_is_on_one_disk(striped: tuple[Path, Path, Path]) -> None:
    _, folder, other = striped
    manifest = Manifest.of(folder / "experts.json")
    content = json.loads((folder / "experts.json").read_text())
    assert content["format"] == "speq-experts-4"
    files = [(each / RECORDS_FILE).read_bytes() for each in (folder, other)]
    assert tuple(map(len, files)) == manifest.ends
    covered = [0, 0]
    for entry in content["records"]:
        offset, nbytes, crc32, disk = (*entry, 0)[:4]
        assert zlib.crc32(files[disk][offset : offset + nbytes]) == crc32
        covered[disk] += -(-nbytes // 4096) * 4096
    assert covered == [*map(len, files)]
    there = [len(entry) - 3 for entry in content["records"]]
    for layer in range(manifest.num_layers):
        of_layer = there[layer * manifest.num_experts :][: manifest.num_experts]
        assert abs(3 * sum(of_layer) - manifest.num_experts) <= 3
    assert sorted(os.listdir(other)) == [RECORDS_FILE, STRIPE_FILE]


def test_files_of_a_whole_pack_have_their_form(tiny: Folder, tmp_path: Path) -> None:
    """Earlier versions read packs that are not divided."""
    pack(tiny("olmoe"), tmp_path / "pack", codec="raw")
    content = json.loads((tmp_path / "pack" / "experts.json").read_text())
    assert content["format"] == "speq-experts-2" and "stripe" not in content
    assert {len(entry) for entry in content["records"]} == {3}


@pytest.mark.parametrize("fault", ["gone", "shorter", "another", "damaged", "folder", "unnamed"])
def test_a_stripe_that_cannot_be_used_is_refused(
    fault: str, striped: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, folder, other = striped
    reason = {
        "gone": "is missing|cannot be read",
        "shorter": "has 4096 bytes and its manifest says",
        "another": "is of another pack",
        "damaged": "is not valid JSON",
        "folder": "not a regular file|is a folder|cannot be read",
        "unnamed": "is missing|cannot be read",
    }[fault]
    if fault == "gone":
        shutil.rmtree(other)
    elif fault == "shorter":
        os.truncate(other / RECORDS_FILE, 4096)
    elif fault == "another":
        pack(model, tmp_path / "second", codec="raw", stripe=tmp_path / "theirs")
        shutil.rmtree(other)
        shutil.copytree(tmp_path / "theirs", other)
    elif fault == "damaged":
        (other / STRIPE_FILE).write_text("{")
    elif fault == "folder":
        (other / RECORDS_FILE).unlink()
        (other / RECORDS_FILE).mkdir()
    else:
        (other / STRIPE_FILE).unlink()
    with pytest.raises(SpeqError) as refused:
        load(folder)
    said = str(refused.value)
    assert re.search(reason, said) and said.count(";") == 1 and "\n" not in said
    assert said.startswith("a part of the pack's experts cannot be read: ")
    assert said.endswith(
        f"mount the disk of {other} with what was packed to it, or pack the model again"
    )


def test_another_command_says_it_in_one_line(
    striped: tuple[Path, Path, Path], command: Command
) -> None:
    _, folder, other = striped
    shutil.rmtree(other)
    ended = command("generate", folder, "--prompt", "a", "--memory-budget", "64MiB")
    assert ended.code == 1 and f"mount the disk of {other}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("at", [0, 1])
def test_a_spoilt_record_is_an_error(at: int, striped: tuple[Path, Path, Path]) -> None:
    file = striped[1 + at] / RECORDS_FILE
    content = bytearray(file.read_bytes())
    content[::512] = bytes(each ^ 1 for each in content[::512])
    file.write_bytes(content)
    with pytest.raises(SpeqError, match=rf"^{re.escape(str(file))}: .* is not what was packed;"):
        generate(striped[1])


def test_a_disk_that_vanishes_in_the_middle(striped: tuple[Path, Path, Path]) -> None:
    _, folder, other = striped
    generator = load(folder)
    generator.resize(generator.runtime.least_budget)  # so that experts are read again and again
    stream = generator.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    for _ in range(5):
        next(stream)
    os.truncate(other / RECORDS_FILE, 0)
    with pytest.raises(SpeqError) as ended:
        list(stream)
    assert str(ended.value).startswith(f"{other / RECORDS_FILE} ended at byte")
    generator.close()


def test_a_proof_compares_both_disks(striped: tuple[Path, Path, Path], command: Command) -> None:
    _, folder, other = striped
    flip_byte(other / RECORDS_FILE, 4096)
    checked = command("prove", folder, "--memory-budget", "64MiB", "--minutes", "0")
    assert checked.code == 1 and str(other / RECORDS_FILE) in checked.err
    assert "is not what was packed" in checked.err


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_moment(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    """Nothing opens before both disks have all; the same command goes on, with other rates too."""
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=2)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 100_000)  # some records a batch
    moments, lived = 1 - every, False
    while not lived:
        moments += every
        out, other = tmp_path / f"killed-{moments}", tmp_path / f"other-{moments}"
        rates[:] = [2e9, 1e9]
        work = partial(pack, source, out, codec="raw", stripe=other)
        lived = killed_at(moments, MOMENTS, work)
        whole = (out / "config.json").exists() and not (out / "experts.journal").exists()
        assert not lived or whole
        if not whole:
            with pytest.raises(SpeqError):
                open_model(out)
            rates[:] = [1e9, 2e9]
            work()
        assert same(source, out)
        assert sorted(os.listdir(other)) == [RECORDS_FILE, STRIPE_FILE]
        for folder in (out, other):
            shutil.rmtree(folder)
    assert moments > 50


@pytest.mark.parametrize("full", ["pack", "other"])
def test_a_disk_that_fills_up(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    """The sentence names the disk that is full."""
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 20_000)
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == tmp_path / full / RECORDS_FILE and os.fstat(descriptor).st_size > 40_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    out, other = tmp_path / "pack", tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        said = re.escape(f"{tmp_path / full} cannot be written: No space left on device; packed")
        with pytest.raises(SpeqError, match=said):
            pack(source, out, codec="raw", stripe=other)
    with pytest.raises(SpeqError, match=f"an unfinished pack with the stripe {other}; give"):
        pack(source, out, codec="raw", stripe=tmp_path / "third")
    with pytest.raises(SpeqError, match=f"an unfinished pack with the stripe {other}; give"):
        pack(source, out, codec="raw")
    pack(source, out, codec="raw", stripe=other)
    assert same(source, out)


@pytest.mark.parametrize("place", ["gone", "empty"])
def test_an_unfinished_pack_waits_for_its_disk(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    """Without its second disk nothing of it is touched, and with it nothing is packed again."""
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 20_000)
    out, other, away = (tmp_path / name for name in ("pack", "other", "away"))
    work, add, added = partial(pack, source, out, codec="raw", stripe=other), RecordFiles.add, []

    def adding(files: RecordFiles, made: EncodedExpert, disk: int) -> Record:
        if len(added) == 20:
            raise KeyboardInterrupt
        added.append(disk)
        return add(files, made, disk)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFiles, "add", adding)
        with pytest.raises(KeyboardInterrupt):
            work()
    journal = (out / "experts.journal").read_bytes()
    kept = len(journal.splitlines()) - 1
    records = (out / RECORDS_FILE).read_bytes()
    other.rename(away)
    if place == "empty":
        other.mkdir()
    said = re.escape(f"{other / STRIPE_FILE} cannot be read: No such file or directory; mount the")
    with pytest.raises(SpeqError, match=said):
        work()
    assert [*tmp_path.glob("other/*")] == [] and other.exists() == (place == "empty")
    assert (out / "experts.journal").read_bytes() == journal and kept > 0
    assert (out / RECORDS_FILE).read_bytes() == records
    if place == "empty":
        other.rmdir()
    away.rename(other)
    left = []
    monkeypatch.setattr(
        RecordFiles, "add", lambda files, made, disk: left.append(disk) or add(files, made, disk)
    )
    manifest = work()
    assert len(left) == len(manifest.records) - kept
    assert same(source, out)


def test_a_disk_that_fails_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, opened = [tmp_path / "pack", tmp_path / "other"], []
    folders[0].mkdir()

    open_at = record_writer.open_at

    def opening(path: Path, end: int) -> BinaryIO:
        opened.append(open_at(path, end))
        return opened[-1]

    monkeypatch.setattr(record_writer, "open_at", opening)
    with pytest.raises(SpeqError, match=f"^{folders[1]} cannot be written: No such file"):
        RecordFiles(folders, [])
    assert [file.closed for file in opened] == [True]
    folders[1].mkdir()
    opened.clear()
    files = RecordFiles(folders, [])
    for file in opened:
        file.write(b"later")
    with open(os.devnull, "rb") as unwritable:
        os.dup2(unwritable.fileno(), opened[1].fileno())
    with pytest.raises(SpeqError, match=f"^{folders[1]} cannot be written: Bad file descriptor"):
        files.close()
    assert [file.closed for file in opened] == [True, True]
    assert (folders[0] / RECORDS_FILE).read_bytes() == b"later"


def test_a_disk_without_room(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    """Each disk must have room for its part, and no more."""
    model, usage = tiny("olmoe"), shutil.disk_usage
    nbytes = pack(model, tmp_path / "whole", codec="raw").ends[0]
    free = {"pack": 1 << 40, "other": nbytes // 3 - 4096}

    def patched(path: Path) -> Any:
        return usage(path)._replace(free=free[path.name])

    monkeypatch.setattr(shutil, "disk_usage", patched)
    out, other = tmp_path / "pack", tmp_path / "other"
    with pytest.raises(SpeqError, match=rf"packing takes .* of disk are left at {other};"):
        pack(model, out, codec="raw", stripe=other)
    free["other"] = nbytes // 3 + 4096
    assert sum(pack(model, out, codec="raw", stripe=other).ends) == nbytes


def test_folders_that_are_taken(striped: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, folder, other = striped
    new = tmp_path / "new"
    with pytest.raises(SpeqError, match="mirror and stripe are given together"):
        pack(model, new, codec="raw", mirror=tmp_path / "a", stripe=tmp_path / "b")
    with pytest.raises(SpeqError, match="exists and holds other files"):
        pack(model, new, codec="raw", stripe=other)
    with pytest.raises(SpeqError, match="is the pack's own folder"):
        pack(model, new, codec="raw", stripe=new)
    with pytest.raises(SpeqError, match="is a model already"):
        pack(model, folder, codec="raw", stripe=other)
    with pytest.raises(SpeqError, match="is divided between two disks already"):
        pack(model, folder, codec="raw", mirror=tmp_path / "mirror")
    (tmp_path / "file").touch()
    with pytest.raises(SpeqError, match="file cannot be written"):
        pack(model, new, codec="raw", stripe=tmp_path / "file")
    pack(model, new, codec="raw", stripe=tmp_path / "free")  # nothing of the refused is in the way
    assert same(model, new)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stripe": None}, "has records on a disk that it does not name"),
        ({"stripe": "there"}, "is damaged"),
        ({"stripe": ["there", 1]}, "is damaged"),
        ({"stripe": ["a\0b", "1"]}, "a part of the pack's experts cannot be read"),
        ({"format": "speq-experts-5"}, "this version reads speq-experts-2, speq-experts-3, speq-"),
    ],
)
def test_manifests_that_are_none(
    change: dict[str, Any], sentence: str, striped: tuple[Path, Path, Path]
) -> None:
    path = striped[1] / "experts.json"
    entries = json.loads(path.read_text())
    del entries["crc32"]
    path.write_text(json.dumps(seal(entries | change)))
    with pytest.raises(SpeqError, match=sentence):
        load(striped[1])


def test_the_command_says_what_lies_where(tiny: Folder, tmp_path: Path, command: Command) -> None:
    ended = command(
        *("pack", tiny("olmoe"), "--out", tmp_path / "pack"),
        *("--codec", "raw", "--stripe", tmp_path / "other"),
    )
    assert ended.code == 0
    manifest = Manifest.of(tmp_path / "pack" / "experts.json")
    there = sum(record.disk for record in manifest.records)
    assert f"{tmp_path / 'other'}: {there} of them, " in ended.out
