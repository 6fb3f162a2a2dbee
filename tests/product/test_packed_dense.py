"""Packs with records of the matrices outside the experts: read as they are, checked, or refused."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator, SpeqError
from speq.experts import packed_dense
from speq.files.alignment import ALIGNMENT
from speq.files.checksums import seal
from speq.kernels import dense_ops
from speq.kernels.dense_ops import RecordMatrix
from speq.layers.dense_matrix import RawMatrix
from speq.models import dense as dense_module
from speq.models.opened import open_model
from speq.planning.model_spec import ModelSpec
from tests.helpers.damage import flip, resized
from tests.helpers.packing import pack_to, without_checksums
from tests.helpers.picture_files import stored_tensors
from tests.helpers.tiny_models import BY_FAMILY, write_model

Folder = Callable[[str], Path]
PROMPT = [*range(40, 60)]
RUN: dict[str, Any] = {"draft": "none", "context_length": 64, "packed_copy": "none"}
HEAD = "lm_head.weight"


@pytest.fixture
def packed(tiny_bfloat16: Folder, tmp_path: Path) -> Path:
    pack_to(tiny_bfloat16("olmoe"), tmp_path / "packed", codec="lossless").close()
    return tmp_path / "packed"


def never(*_: Any) -> Tensor:
    raise AssertionError("nothing is to be encoded")


def generator_of(model: Path, dense: str) -> Generator:
    return Generator.from_pretrained(model, "8MiB", dense=dense, **RUN)


def tokens_of(model: Path, dense: str) -> list[int]:
    generator = generator_of(model, dense)
    try:
        result = generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        assert result.stats["dense"] == dense
        return list(result.token_ids)
    finally:
        generator.close()


@pytest.mark.parametrize("codec", ["lossless", "residual"])
def test_records_give_back_the_words(codec: str, tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """By plain reading of the files, without our own reader."""
    source, packed = tiny_bfloat16("qwen2_moe"), tmp_path / "packed"
    opened = pack_to(source, packed, codec=codec)
    names = opened.shape.dense_names
    opened.close()
    manifest = json.loads((packed / "experts.json").read_text())
    data = (packed / "dense.bin").read_bytes()
    stored = stored_tensors(source)
    assert tuple(manifest["dense"]) == names and len(names) > 20
    assert len(data) % ALIGNMENT == 0
    held = {name: entry for name, entry in manifest["dense"].items() if entry is not None}
    assert HEAD in held
    for name, words in stored.items():
        if name in held:
            offset, nbytes, crc32 = held[name]
            record = data[offset : offset + nbytes]
            assert offset % ALIGNMENT == 0 and nbytes < words.nbytes
            assert zlib.crc32(record) == crc32
            held_record = torch.frombuffer(bytearray(record), dtype=torch.uint8)
            assert torch.equal(RecordMatrix(held_record, *words.shape).words(), words)
        elif name in manifest["dense"]:
            assert dense_ops.encode_dense(words).nbytes >= words.nbytes


def test_raw_packs_have_none(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    opened = pack_to(tiny_bfloat16("olmoe"), tmp_path / "packed")
    assert opened.dense is None
    opened.close()
    assert not (tmp_path / "packed" / "dense.bin").exists()


# Families with some matrices in one tensor on disk: packs leave it as it is, and runs encode these.
SPLIT = ("sarvam_moe",)


@pytest.mark.parametrize("family", [each for each in BY_FAMILY if each.values[0] not in SPLIT])
def test_runs_read_records_and_encode_none(
    family: str, tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, packed = tiny_bfloat16(family), tmp_path / "packed"
    opened = pack_to(source, packed, codec="lossless")
    planned = ModelSpec.of_model("packed", opened, "auto").with_dense("lossless").dense
    opened.close()
    expected = tokens_of(source, "raw")
    encoding = generator_of(source, "lossless")
    wanted = encoding.runtime.model.dense_sizes
    encoding.close()
    monkeypatch.setattr(dense_module, "smaller_record", never)
    assert tokens_of(packed, "lossless") == tokens_of(packed, "raw") == expected
    reading = generator_of(packed, "lossless")
    runtime = reading.runtime
    assert list(planned.sizes) == runtime.model.dense_sizes == wanted
    assert planned.packed and planned.loading_bytes(4, 0) == 0
    assert runtime.plan.items["non_expert_weights"] == runtime.model.nbytes
    stored = stored_tensors(source)
    for name, layer in runtime.model.dense.items():
        assert isinstance(layer.exact, RecordMatrix | RawMatrix)
        tied = name == "lm_head" and runtime.opened.shape.tied
        module = "model.embed_tokens" if tied else name
        words = stored[f"{module}.weight"]
        assert torch.equal(layer.exact.words(), words)
    reading.close()


def test_a_tied_head_has_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of several shards."""
    tied = {"tie_word_embeddings": True, "max_shard_size": "40KB"}
    source = write_model(tmp_path / "m", "olmoe", torch.bfloat16, **tied)
    pack_to(source, tmp_path / "packed", codec="lossless").close()
    manifest = json.loads((tmp_path / "packed" / "experts.json").read_text())
    assert HEAD not in manifest["dense"]
    expected = tokens_of(source, "raw")
    monkeypatch.setattr(dense_module, "smaller_record", never)
    assert tokens_of(tmp_path / "packed", "lossless") == expected


def test_words_that_are_not_used_are_not_compared(packed: Path) -> None:
    """A run by records reads no words of these matrices; one by words does."""
    opened = open_model(packed)
    file, info = opened.checkpoint.tensors[HEAD]
    opened.close()
    flip("model.safetensors", (info.offset + 5) / file.size)(packed)
    generator_of(packed, "lossless").close()
    with pytest.raises(SpeqError, match=f"tensor {HEAD} is not what was packed"):
        generator_of(packed, "raw")


def test_packs_without_them_are_encoded(packed: Path) -> None:
    expected = tokens_of(packed, "lossless")
    entries = json.loads((packed / "experts.json").read_text())
    del entries["crc32"], entries["dense"]
    (packed / "experts.json").write_text(json.dumps(seal(entries)))
    (packed / "dense.bin").unlink()
    opened = open_model(packed)
    assert opened.dense is None and opened.packed_dense(torch.bfloat16) == ()
    opened.close()
    assert tokens_of(packed, "lossless") == expected


def test_a_record_is_only_for_the_tensor_it_was_made_of(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not mapped from the shards as it is stored is encoded from its own words."""
    expected = tokens_of(packed, "raw")
    encoded: list[int] = []
    made = packed_dense.smaller_record

    def watched(words: Tensor) -> Tensor | None:
        encoded.append(words.numel())
        return made(words)

    monkeypatch.setattr(dense_module, "smaller_record", watched)
    monkeypatch.setattr("speq.models.resident.mapped_regions", list)
    assert tokens_of(packed, "lossless") == expected
    opened = open_model(packed)
    assert sorted(encoded) == sorted(rows * columns for rows, columns in opened.shape.dense)
    opened.close()


# Damage.


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (resized("dense.bin", lambda size: size - 4096), r"dense\.bin has \d+ bytes and its man"),
        (resized("dense.bin", lambda size: size + 1), r"dense\.bin has \d+ bytes and its manifest"),
        (resized("dense.bin", lambda size: 0), r"dense\.bin has 0 bytes and its manifest says"),
        (lambda out: os.unlink(out / "dense.bin"), r"dense\.bin cannot be read: No such file"),
    ],
)
def test_damaged_files_are_refused(
    packed: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(packed)
    with pytest.raises(SpeqError, match=message):
        open_model(packed)


def test_a_flipped_bit_in_any_record_is_found(packed: Path) -> None:
    manifest = json.loads((packed / "experts.json").read_text())
    sound = (packed / "dense.bin").read_bytes()
    for name, entry in manifest["dense"].items():
        if entry is None:
            continue
        flip("dense.bin", (entry[0] + entry[1] // 2 + 0.5) / len(sound))(packed)
        opened = open_model(packed)
        assert opened.dense is not None
        with pytest.raises(SpeqError, match=rf"dense\.bin: the record of {name}, {entry[1]} bytes"):
            opened.dense.read(name)
        opened.close()
        (packed / "dense.bin").write_bytes(sound)
    flip("dense.bin", 0.01)(packed)
    with pytest.raises(SpeqError, match=r"dense\.bin: the record of .* is not what was packed; pa"):
        generator_of(packed, "lossless")
    generator_of(packed, "raw").close()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (7, "is damaged"),
        (None, "is damaged"),
        ([[0, 1, 2]], "is damaged"),
        ({HEAD: [0, 1]}, "is damaged"),
        ({HEAD: [0, -1, 2]}, "is damaged"),
        ({HEAD: "much"}, "is damaged"),
        ({HEAD: [4096, 10, 1]}, "puts a record of 10 bytes at 4096"),
        ({HEAD: [0, 0, 1]}, "puts a record of 0 bytes at 0"),
        ({HEAD: [0, 10, 1]}, r"a record of 10 bytes of lm_head\.weight; one of a matrix \["),
        ({HEAD: [0, 1 << 40, 1]}, r"a record of 1099511627776 bytes of lm_head\.weight; one of"),
        ({"nobody": [0, 10, 1]}, "a record of nobody, not a bfloat16 matrix of its shards"),
        ({"model.norm.weight": None}, r"model\.norm\.weight, not a bfloat16 matrix"),
    ],
    ids=str,
)
def test_damaged_manifests_are_one_sentence(packed: Path, entries: Any, message: str) -> None:
    without_checksums(packed, dense=entries)
    with pytest.raises(SpeqError, match=message):
        open_model(packed)
