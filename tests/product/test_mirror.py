"""A pack whose experts lie on two disks: reads are divided, and either disk may fail."""

import heapq
import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from speq import Generator, SpeqError, pack
from speq.experts.mirrored_records import MIRROR_FILE, DiskLoads
from speq.experts.packed_store import RECORDS_FILE, Manifest
from tests.helpers.command import Command
from tests.helpers.damage import flip_byte
from tests.helpers.full_disk import room_is
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("rates", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (1.0, 0.05)])
@pytest.mark.parametrize("under_way", [4, 8])
def test_reads_are_divided_by_speed(rates: tuple[float, float], under_way: int) -> None:
    """Simulated disks, each of which carries its reads out in turn; so many are under way."""
    now_s, rng = 0.0, random.Random(1)
    loads = DiskLoads(2, lambda: now_s)
    free_s, moved = [0.0, 0.0], [0, 0]
    ends: list[tuple[float, int, int, int]] = []
    for number in range(3000):
        nbytes = rng.randint(50, 150)
        at = loads.begin(nbytes)
        free_s[at] = max(free_s[at], now_s) + nbytes / rates[at]
        moved[at] += nbytes
        heapq.heappush(ends, (free_s[at], number, at, nbytes))
        if len(ends) == under_way:
            now_s, number, at, nbytes = heapq.heappop(ends)
            loads.end(at, nbytes)
    assert now_s < 1.12 * sum(moved) / sum(rates)


@pytest.fixture
def packed(tiny: object, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, its pack, and the mirror's folder."""
    model = tiny("olmoe")  # type: ignore[operator]
    pack(model, tmp_path / "pack", codec="raw", mirror=tmp_path / "other")
    return model, tmp_path / "pack", tmp_path / "other"


def generate(folder: Path, tokens: int = 24) -> list[int]:
    generator = Generator.from_pretrained(
        folder, "20MiB", dtype="float32", draft="none", profile="none", verify_reads=True
    )
    made = generator.generate(PROMPT, max_new_tokens=tokens, ignore_eos=True).token_ids
    records = generator.runtime.opened.store._records[0]  # type: ignore[attr-defined]
    busy = [load.read_bytes > 0 for load in records.loads._loads]
    generator.close()
    assert all(busy)
    return made


def spoil(file: Path) -> None:
    """Have no record be what was packed."""
    content = bytearray(file.read_bytes())
    for at in range(0, len(content), 512):
        content[at] ^= 1
    file.write_bytes(content)


def test_runs_read_from_both(packed: tuple[Path, Path, Path]) -> None:
    model, folder, other = packed
    assert (other / RECORDS_FILE).read_bytes() == (folder / RECORDS_FILE).read_bytes()
    assert os.listdir(other) == [RECORDS_FILE]
    assert generate(folder) == greedy_tokens(load_plain(model), PROMPT, 24)


@pytest.mark.parametrize("spoilt", ["mirror", "pack"])
def test_a_disk_with_spoilt_records_is_left_out(
    spoilt: str, packed: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, folder, other = packed
    file = (folder if spoilt == "pack" else other) / RECORDS_FILE
    spoil(file)
    with caplog.at_level(logging.WARNING):
        assert generate(folder) == greedy_tokens(load_plain(model), PROMPT, 24)
    told = [each.getMessage() for each in caplog.records if str(file) in each.getMessage()]
    assert len(told) == 1 and "experts are read from one disk" in told[0]


def test_both_spoilt_are_refused(packed: tuple[Path, Path, Path]) -> None:
    _, folder, other = packed
    spoil(folder / RECORDS_FILE)
    spoil(other / RECORDS_FILE)
    with pytest.raises(SpeqError, match="is not what was packed"):
        generate(folder)


def test_a_disk_that_vanishes_in_the_middle(
    packed: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, folder, _ = packed
    generator = Generator.from_pretrained(
        folder, "20MiB", dtype="float32", draft="none", profile="none"
    )
    generator.resize(generator.runtime.least_budget)  # so that experts are read again and again
    stream = generator.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    made = [next(stream).id for _ in range(5)]
    # The faster one, which is read next whatever else happens.
    records = generator.runtime.opened.store._records[0]  # type: ignore[attr-defined]
    rates = [load.bytes_per_s or 0.0 for load in records.loads._loads]
    os.truncate(records.files[rates.index(max(rates))].path, 0)
    with caplog.at_level(logging.WARNING):
        made += [token.id for token in stream]
    assert made == greedy_tokens(load_plain(model), PROMPT, 40)
    assert caplog.text.count("experts are read from one disk") == 1
    generator.close()


@pytest.mark.parametrize("fault", ["gone", "shorter", "another", "damaged", "folder"])
def test_a_mirror_that_cannot_be_used_is_said(
    fault: str, packed: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, folder, other = packed
    records, named = other / RECORDS_FILE, folder / MIRROR_FILE
    if fault == "gone":
        shutil.rmtree(other)
    elif fault == "shorter":
        os.truncate(records, 4096)
    elif fault == "another":
        named.write_text(json.dumps({"format": 2, "records": str(records)}))
    elif fault == "damaged":
        named.write_text("{")
    else:
        records.unlink()
        records.mkdir()
    generator = Generator.from_pretrained(folder, "20MiB", dtype="float32", draft="none")
    made = generator.generate(PROMPT, max_new_tokens=9, ignore_eos=True).token_ids
    assert made == greedy_tokens(load_plain(model), PROMPT, 9)
    assert caplog.text.count("experts are read from one disk") == 1
    generator.close()


def test_a_mirror_that_was_cut_short_is_written_anew(
    packed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on, and does not pack again."""
    model, folder, other = packed
    whole = (folder / RECORDS_FILE).read_bytes()
    before = os.stat(folder / RECORDS_FILE).st_mtime_ns
    shutil.rmtree(other)
    (folder / MIRROR_FILE).unlink()
    with monkeypatch.context() as patch:
        room_is(patch, len(whole) - 1)
        with pytest.raises(SpeqError, match=r"the mirror takes .* are free at"):
            pack(model, folder, codec="raw", mirror=other)
    assert not (folder / MIRROR_FILE).exists()
    made = pack(model, folder, codec="raw", mirror=other)
    assert made == Manifest.of(folder / "experts.json")
    assert (other / RECORDS_FILE).read_bytes() == whole
    assert os.stat(folder / RECORDS_FILE).st_mtime_ns == before
    assert generate(folder) == greedy_tokens(load_plain(model), PROMPT, 24)
    with pytest.raises(SpeqError, match="is a model already"):
        pack(model, folder, codec="raw")
    # A pack by another codec is not taken for this one: here weights are of 32 bits.
    with pytest.raises(SpeqError, match="lossless"):
        pack(model, folder, codec="lossless", mirror=other)
    with pytest.raises(SpeqError, match="is the pack's own folder"):
        pack(model, folder, codec="raw", mirror=folder)


def test_a_proof_compares_the_mirror(packed: tuple[Path, Path, Path], command: Command) -> None:
    _, folder, other = packed
    flip_byte(other / RECORDS_FILE, 4096)
    checked = command("prove", folder, "--memory-budget", "64MiB", "--minutes", "0")
    assert checked.code == 1 and str(other / RECORDS_FILE) in checked.err
    assert "is not what was packed" in checked.err
