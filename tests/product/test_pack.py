"""Packed models: the same experts, whole or refused, whenever packing was interrupted."""

import json
import os
import re
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import speq
from speq import Generator, SpeqError
from speq.cli import app
from speq.devices.device import Processor
from speq.experts import record_writer
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.packed_store import PackedExpertStore
from speq.experts.passes import map_in_order, results_in_flight
from speq.files.checkpoint import Checkpoint
from speq.files.checksums import seal
from speq.files.safetensors_file import SafetensorsFile
from speq.models import moe_model
from speq.models.opened import open_model
from tests.helpers.damage import flip, last, line_of, lines, resized
from tests.helpers.full_disk import full_at_flush, room_is
from tests.helpers.killed import killed_at
from tests.helpers.packing import MOMENTS, pack_to, records_of, same, without_checksums
from tests.helpers.tiny_models import BY_FAMILY, greedy_tokens, load_plain, write_model
from tests.helpers.told import Told

Folder = Callable[[str], Path]
PROMPT = [*range(40, 70)]


@pytest.mark.parametrize("family", BY_FAMILY)
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
    told = Told()
    opened = pack_to(tiny("qwen2_moe"), tmp_path / "packed", told)
    opened.close()
    manifest = json.loads((tmp_path / "packed" / "experts.json").read_text())
    data = (tmp_path / "packed" / "experts.bin").read_bytes()
    plain = records_of(tiny("qwen2_moe"))
    assert len(manifest["records"]) == len(plain)
    experts = [(done, total) for what, done, total in told.calls if what == "packing experts"]
    assert experts == [(done, len(plain)) for done in range(1, len(plain) + 1)]
    assert not told.unfinished
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


def test_a_pack_goes_on_with_the_weights_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards of gigabytes the fingerprint misses a changed expert."""
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "the same")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)

    def enough(what: str, done: int, total: int) -> None:
        if what == "packing experts" and done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_to(source, tmp_path / "packed", enough)
    with SafetensorsFile(source / "model.safetensors") as shard:
        info = shard.tensors["model.layers.0.mlp.experts.6.up_proj.weight"]
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.nbytes))
    pack_to(source, tmp_path / "packed").close()
    pack_to(source, tmp_path / "anew").close()
    for name in ("experts.bin", "experts.json"):
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "anew" / name).read_bytes()


def test_a_model_that_changes_while_it_is_packed_makes_no_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source", "olmoe")

    def touched(what: str, done: int, total: int) -> None:
        if what == "packing experts" and done == 9:
            os.utime(source / "model.safetensors")

    with pytest.raises(SpeqError, match="were changed or replaced while they were read"):
        pack_to(source, tmp_path / "packed", touched)
    assert not (tmp_path / "packed" / "config.json").exists()
    pack_to(source, tmp_path / "packed").close()
    assert same(source, tmp_path / "packed")


def test_weights_of_other_kinds_stay_behind(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    foreign = ("pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.Q4_K.gguf")
    taken = ("LICENSE", "NOTICE.txt", "README.md", "chat_template.jinja", "tokenizer.model")
    for name in (*foreign, *taken):
        (source / name).write_text(name)
    pack_to(source, tmp_path / "packed").close()
    names = {each.name for each in (tmp_path / "packed").iterdir()}
    assert names >= {"config.json", *taken} and not names & set(foreign)


def test_two_packers_do_not_write_one_folder(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "olmoe")

    def second(what: str, done: int, total: int) -> None:
        if what == "packing experts" and done == 9:
            with pytest.raises(SpeqError, match=r"another process packs to .*packed; wait for"):
                pack_to(source, tmp_path / "packed")

    pack_to(source, tmp_path / "packed", second).close()
    assert same(source, tmp_path / "packed")


@pytest.mark.parametrize("out", ["source/config.json", "/proc/no-folder"])
def test_folders_that_cannot_be_written_are_refused_at_once(tmp_path: Path, out: str) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    with pytest.raises(SpeqError, match=r"cannot be written: .*; choose another folder$"):
        speq.pack(source, tmp_path / out)


# Of these, what comparing records that are there already does not pass.
WRITING = tuple(moment for moment in MOMENTS if moment[1] != "crc32_of")


def pack_and_die(
    model: Path, out: Path, at: int, moments: Sequence[tuple[Any, str]] = MOMENTS
) -> bool:
    """Pack in a process of its own that is killed at a moment; whether it lived."""
    return killed_at(at, moments, lambda: pack_to(model, out))


@pytest.mark.wide
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.wide)])
def test_killed_at_any_moment(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing opens before all is there; what was journalled is not read again."""
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=2)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 100_000)  # some records a batch
    moments, lived = 1 - every, False
    while not lived:
        moments += every
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
    source = write_model(tmp_path / "source", "mixtral", num_hidden_layers=4)
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 1)
    out = tmp_path / "packed"
    runs = 1
    while not pack_and_die(source, out, 45, WRITING):
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


class Unfinished(NamedTuple):
    """Half a pack of a model, and all files of a whole one."""

    source: Path
    out: Path
    whole: dict[str, bytes]


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def half_packed(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    """With eight of twelve records journalled, and the shard copied."""
    root = tmp_path_factory.mktemp("unfinished")
    source = write_model(root / "source", "mixtral", num_hidden_layers=2, max_shard_size="100KB")
    pack_to(source, root / "whole").close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_writer, "BATCH_BYTES", 1)
        lived = killed_at(
            9, [(SafetensorsExpertStore, "read")], lambda: pack_to(source, root / "half")
        )
    assert not lived
    for shard in (root / "whole").glob("*.safetensors"):
        shutil.copy(shard, root / "half")
    return Unfinished(source, root / "half", content_of(root / "whole"))


def shard_damage(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        for shard in out.glob("*.safetensors"):
            change(shard)

    return damage


RECORD = [7 * 73728, 73728, 1, None]
AFTER_DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda out: None,
    "cut line": lines(lambda found: [*found[:-1], found[-1][:-5]]),
    "lost line": lines(lambda found: [*found[:4], *found[5:]]),
    "reordered": lines(lambda found: [found[0], *reversed(found[1:])]),
    "twice": lines(lambda found: [*found, found[-1]]),
    "changed digit": lines(lambda found: [*found[:3], found[3].replace(b"1", b"2"), *found[4:]]),
    "deep": last(b"[" * 100_000),
    "deep but whole": last(b"[" * 90 + b"]" * 90),
    "negative": last([-1, *RECORD[1:]]),
    "another offset": last([4096, *RECORD[1:]]),
    "boolean": last([RECORD[0], RECORD[1], True, None]),
    "texts": last(["1", "2", "3", None]),
    "fractions": last([float(each) for each in RECORD[:3]]),
    "not a number": last([float("nan")] * 4),
    "null": last(None),
    "object": last({"offset": 0}),
    "empty": last([]),
    "another size": last([RECORD[0], 4096, 1, None]),
    "a size of any length": last([RECORD[0], 2**62, 1, None]),
    "another checksum": last(RECORD),
    "more lines than experts": lines(lambda found: found + found[1:] * 3),
    "damaged header": lines(lambda found: [b"{}\n", *found[1:]]),
    "header of an earlier version": lines(lambda found: [found[0][9:], *found[1:]]),
    "empty journal": lines(lambda found: []),
    "journal of rubbish": lines(lambda found: [b"\xff\x00" * 900]),
    "a flipped bit at the front": flip("experts.bin", 0.01),
    "a flipped bit further on": flip("experts.bin", 0.6),
    "records emptied": resized("experts.bin", lambda size: 0),
    "records cut": resized("experts.bin", lambda size: size // 2 + 5),
    "records longer": resized("experts.bin", lambda size: size + 5000),
    "records gone": lambda out: (out / "experts.bin").unlink(),
    "shards emptied": shard_damage(lambda shard: os.truncate(shard, 0)),
    "shards longer": shard_damage(lambda shard: os.truncate(shard, shard.stat().st_size + 9)),
    "shards damaged": shard_damage(lambda shard: shard.write_bytes(shard.read_bytes()[::-1])),
    "shards gone": shard_damage(Path.unlink),
}


@pytest.mark.parametrize("name", AFTER_DAMAGE)
def test_going_on_after_damage_makes_the_same_pack(
    name: str, half_packed: Unfinished, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = Path(shutil.copytree(half_packed.out, tmp_path / "packed"))
    AFTER_DAMAGE[name](out)
    pack_to(half_packed.source, out).close()
    assert content_of(out) == half_packed.whole
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert bool(said) == (name not in ("nothing", "records longer") and "shards" not in name)
    if "journal" in name or "header" in name:
        assert said == [f"{out / 'experts.journal'} is damaged: all of it starts again"]


def test_a_damaged_journal_beside_other_files(half_packed: Unfinished, tmp_path: Path) -> None:
    """What may be a user's is not written over."""
    out = Path(shutil.copytree(half_packed.out, tmp_path / "packed"))
    (out / "experts.journal").write_text("nonsense")
    (out / "notes.txt").write_text("mine")
    before = content_of(out)
    with pytest.raises(SpeqError, match=r"journal is damaged, and .* holds notes\.txt; remove the"):
        pack_to(half_packed.source, out)
    assert content_of(out) == before


# What is not an expert.


def checked(folder: Path) -> None:
    """Open a pack and load all but its experts."""
    opened = open_model(folder)
    try:
        moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    finally:
        opened.close()


def test_every_bit_beside_the_experts_counts(half_packed: Unfinished, tmp_path: Path) -> None:
    """A bit flipped in any tensor, header or file that a run reads."""
    out = tmp_path / "packed"
    pack_to(half_packed.source, out).close()
    checked(out)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 1
    names = [path.name for path in out.glob("*.json")]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(names)
    for name in (*shards, *names):
        sound = (out / name).read_bytes()
        places = [0.5] if name not in shards else [20 / len(sound), 0.6, 0.8, 1 - 1 / len(sound)]
        for place in places:
            flip(name, place)(out)
            with pytest.raises(SpeqError) as refused:
                checked(out)
            if place != places[0] or name not in shards:  # a header may be none any more
                said = str(refused.value)
                assert re.search("not what was packed|is damaged|not valid JSON", said)
            (out / name).write_bytes(sound)
    (out / "tokenizer_config.json").unlink()
    with pytest.raises(SpeqError, match=r"tokenizer_config\.json cannot be read: No such .*; pack"):
        checked(out)


def test_every_tensor_is_compared(half_packed: Unfinished, tmp_path: Path) -> None:
    """Those that are mapped and those that are converted, each once, at every load."""
    out = tmp_path / "packed"
    pack_to(half_packed.source, out).close()
    opened = open_model(out)
    tensors = dict(opened.checkpoint.tensors)
    opened.close()
    assert not any(".experts." in name for name in tensors)
    for name, (file, info) in tensors.items():
        sound = file.path.read_bytes()
        content = bytearray(sound)
        content[info.offset + info.nbytes // 2] ^= 1
        file.path.write_bytes(content)
        with pytest.raises(SpeqError, match=f"tensor {name} is not what was packed; pack the"):
            checked(out)
        file.path.write_bytes(sound)
    checked(out)


def test_a_pack_of_an_earlier_version_opens_and_says_so(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_checksums(packed)
    flip("model.safetensors", 0.9)(packed)
    for _ in range(2):
        checked(packed)
    said = [record.getMessage() for record in caplog.records if "checksums" in record.getMessage()]
    assert said == [
        f"{packed} was packed without checksums of anything but experts: its other weights and "
        "files are not checked; packing the model again adds them"
    ]


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 20_000)
    full_at_flush(monkeypatch, at)
    with pytest.raises(SpeqError, match="cannot be written: No space left on device; packed"):
        pack_to(source, tmp_path / "packed")
    pack_to(source, tmp_path / "packed").close()
    assert same(source, tmp_path / "packed")


def test_a_disk_without_room(tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room_is(monkeypatch, 1 << 10)
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
    usual = open_model(packed)
    with pytest.raises(SpeqError, match=f"expert 1 in MoE layer 1, {nbytes} bytes at {offset}"):
        usual.store.read(1, 1, record)
    usual.close()


@pytest.mark.parametrize("every_read", [False, True])
def test_records_are_compared_at_their_first_read_or_at_every_one(
    packed: Path, every_read: bool
) -> None:
    opened = open_model(packed, verify_reads=every_read)
    record = expert_slot(opened.store)
    opened.store.read(0, 0, record)
    with (packed / "experts.bin").open("r+b") as file:
        file.write(b"rot")
    with pytest.raises(SpeqError, match="is not what was packed") if every_read else nullcontext():
        opened.store.read(0, 0, record)
    opened.close()


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
    without_checksums(packed, **change)
    with pytest.raises(SpeqError, match=message):
        open_model(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "another"},
        {"crc32": None},
        {"crc32": 1},
        {"checksums": None},
        {"checksums": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_is_what_was_written(packed: Path, change: dict[str, Any]) -> None:
    path = packed / "experts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpeqError, match=r"experts\.json is damaged: it is not what was packed"):
        open_model(packed)


@pytest.mark.parametrize("entry", [7, [], {"files": 1}, {"files": {"a": "b"}}], ids=str)
def test_checksums_that_are_none(packed: Path, entry: Any) -> None:
    path = packed / "experts.json"
    entries = json.loads(path.read_text())
    del entries["crc32"]
    path.write_text(json.dumps(seal(entries | {"checksums": entry})))
    with pytest.raises(SpeqError, match=r"experts\.json is damaged \(.*\); pack the model again"):
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
    (begun / "experts.journal").write_bytes(line_of(source))
    with pytest.raises(SpeqError, match="begun holds an unfinished pack of another model"):
        pack_to(tiny("olmoe"), begun)
    with pytest.raises(SpeqError, match="is not packed completely; run the same `speq pack`"):
        open_model(begun)


def test_verifying_wants_a_pack(tiny: Folder, packed: Path) -> None:
    with pytest.raises(SpeqError, match=r"has no checksums to verify reads by.*`speq pack`"):
        Generator.from_pretrained(tiny("olmoe"), "64MiB", verify_reads=True)
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


@pytest.mark.parametrize("codec", ["lossless", "residual"])
def test_packs_of_several_threads_are_those_of_one(
    codec: str, tiny_bfloat16: Folder, tmp_path: Path
) -> None:
    before, names = torch.get_num_threads(), ["experts.bin", "dense.bin", "experts.json"]
    packs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            pack_to(tiny_bfloat16("olmoe"), tmp_path / str(threads), codec=codec).close()
        finally:
            torch.set_num_threads(before)
        packs.append([(tmp_path / str(threads) / name).read_bytes() for name in names])
    assert packs[0] == packs[1]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_turn_and_few_at_a_time(threads: int) -> None:
    lock, held, most = threading.Lock(), 0, 0

    def work(item: int) -> int:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        if item == 40:
            raise SpeqError("no such item")
        return item * item

    found = []
    with pytest.raises(SpeqError, match="no such item"):
        for result in map_in_order(work, range(60), threads):
            found.append(result)
            with lock:
                held -= 1
    assert found == [item * item for item in range(40)]
    assert most <= results_in_flight(threads)


def proven_by_command(model: Path) -> tuple[int, str, str]:
    """Exit code, what was printed, and the error of `speq prove`."""
    ended = CliRunner().invoke(
        app, ["prove", str(model), "--memory-budget", "64MiB", "--minutes", "0"]
    )
    return ended.exit_code, ended.stdout, str(ended.exception)


def test_a_proof_compares_all_of_a_pack(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """Plain transformers would make up the experts it does not find; checksums are there."""
    packed = tmp_path / "packed"
    pack_to(tiny_bfloat16("olmoe"), packed, codec="residual").close()
    manifest = json.loads((packed / "experts.json").read_text())
    counts = {name: len(manifest["checksums"][name]) for name in ("tensors", "files")}
    assert counts["tensors"] > 20
    records = [entry for entry in manifest["dense"].values() if entry is not None]
    assert len(records) > 5
    code, out, _ = proven_by_command(packed)
    assert code == 0
    assert (
        f"passed: 24 experts are what was packed, and {len(records)} dense records, "
        f"{counts['tensors']} other tensors and {counts['files']} files; to compare with "
        "transformers, give the model that it was packed from"
    ) in out
    for name, message in (
        ("experts.bin", "the record of expert . in MoE layer"),
        ("dense.bin", r"dense\.bin: the record of .* is not what was packed"),
        ("draft.bin", r"draft\.bin is not what was packed"),
        ("model.safetensors", r"model\.safetensors: tensor .* is not what was packed"),
        ("config.json", r"config\.json is not (what was packed|valid JSON)"),
    ):
        sound = (packed / name).read_bytes()
        flip(name, 0.5)(packed)
        code, out, error = proven_by_command(packed)
        assert (code, out) == (1, "")
        assert re.search(message, error), error
        (packed / name).write_bytes(sound)
    without_checksums(packed)
    code, out, _ = proven_by_command(packed)
    assert code == 0
    assert "and nothing else, which this pack has no checksums of: pack the model again" in out
