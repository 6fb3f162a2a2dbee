"""Compact records: packed or encoded as they are read, they are the checkpoint's words, over the
draft they were made with and no other.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from speq import Generator, SpeqError
from speq.cli import app
from speq.drafts.draft_source import open_draft
from speq.experts import pack as pack_module
from speq.experts import packed_dense, record_writer
from speq.experts.codec import ExpertShape, codec_of
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, expert_slot
from speq.experts.host_tier import HostRoom, HostTier
from speq.experts.int4 import Int4Arena, Int4Expert
from speq.experts.packed_store import PackedExpertStore
from speq.files.alignment import align
from speq.files.checksums import seal
from speq.models import moe_model
from speq.models.opened import Opened, open_model
from tests.helpers.gptq_files import Packing, Written, write_gptq
from tests.helpers.host_device import HostDevice
from tests.helpers.killed import killed_at
from tests.helpers.packing import pack_to, without_checksums
from tests.helpers.picture_files import stored_tensors
from tests.helpers.quantising import SETTINGS, quantise_to
from tests.helpers.tiny_models import (
    BIASED,
    BY_FAMILY,
    EXPERTS_BELOW,
    FAMILIES,
    experts_alone,
    greedy_tokens,
    load_plain,
    write_model,
    write_perturbed,
)

Folder = Callable[[str], Path]
Matrices = tuple[Tensor, Tensor]
PROMPT = [*range(40, 70)]


def published(model: Path, opened: Opened) -> list[Matrices]:
    """gate over up, and down, of every expert, as the safetensors library reads them."""
    old = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found = []
    tensors = experts_alone(stored_tensors(model))
    for layer in opened.shape.experts.layers:
        for expert in range(opened.shape.experts.num_experts):
            parts = {}
            gated = opened.shape.experts.gated
            for new, short in [*old.items()][not gated :]:
                prefix = f"model.layers.{layer}"
                names = (
                    f"{prefix}.mlp.experts.{expert}.{new}.weight",
                    f"{prefix}.mlp.experts.{expert}.{short}.weight",
                    f"{prefix}.block_sparse_moe.experts.{expert}.{short}.weight",
                    *(
                        f"{EXPERTS_BELOW[each].format(layer)}.{expert}.{new}.weight"
                        for each in ("gemma4", "granitemoe", "nemotron_h")
                    ),
                    f"{EXPERTS_BELOW['lfm2_moe'].format(layer)}.{expert}.{short}.weight",
                )
                parts[new] = next(tensors[name] for name in names if name in tensors)
            *gate_up, down = parts.values()
            found.append((torch.cat(gate_up), down))
    return found


def ordered(exact: Matrices, written: Written, key: tuple[int, int]) -> Matrices:
    """An expert in the order of a GPTQ checkpoint's codes, inputs sorted by group."""
    inputs, inner = (
        np.argsort(written[(*key, projection)]["g_idx"], kind="stable")
        for projection in ("up_proj", "down_proj")
    )
    gate_up = exact[0].view(torch.int16).numpy()[:, inputs]
    parts = np.split(gate_up, len(gate_up) // len(inner))
    gate_up = np.concatenate([part[inner] for part in parts])
    down = exact[1].view(torch.int16).numpy()[:, inner]
    return torch.from_numpy(gate_up), torch.from_numpy(down)


def same_bits(ours: Matrices, theirs: Matrices) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def decoded(store: ExpertStore, at: int, base: Int4Expert | None = None) -> Matrices:
    slot = expert_slot(store).fill_(255)
    store.read(*divmod(at, store.num_experts), slot)
    return store.codec.decode(slot, base)


@pytest.mark.parametrize("family", BY_FAMILY)
def test_lossless_records_are_the_published_words(
    family: str, tiny_bfloat16: Folder, tmp_path: Path
) -> None:
    opened = pack_to(tiny_bfloat16(family), tmp_path / "packed", codec="lossless")
    words = published(tiny_bfloat16(family), opened)
    store = opened.store
    assert all(same_bits(decoded(store, at), exact) for at, exact in enumerate(words))
    sizes = [store.record_bytes(*divmod(at, store.num_experts)) for at in range(len(words))]
    assert len(set(sizes)) > 1
    assert store.codec.slot_bytes == -(-max(sizes) // 4096) * 4096
    assert sum(sizes) < 0.9 * len(words) * 2 * words[0][1].numel() * 3
    # What tools round is rounded from these words.
    plain = open_model(tiny_bfloat16(family))
    for side in (opened, plain):
        assert side.store.tied_draft is None
    drafts = [
        open_draft("auto", side.checkpoint, side.store, side.shape.experts)
        for side in (opened, plain)
    ]
    ours, theirs = (draft.expert(len(words) - 1).parts for draft in drafts)
    assert all(torch.equal(part, theirs[name]) for name, part in ours.items())
    plain.close()
    opened.close()


@pytest.mark.parametrize("family", BY_FAMILY)
@pytest.mark.parametrize("draft", ["rounded", "gptq"])
def test_residual_records_are_the_published_words_over_their_draft(
    family: str, draft: str, tiny_bfloat16: Folder, tmp_path: Path
) -> None:
    model = tiny_bfloat16(family)
    desc_act = family not in BIASED and FAMILIES.index(family) % 2 == 0
    packing = Packing(desc_act=desc_act, group_size=16)
    written = None
    if draft == "gptq":
        written = write_gptq(tmp_path / "draft", model, packing)
    named = "auto" if written is None else str(tmp_path / "draft")
    opened = pack_to(model, tmp_path / "packed", codec="residual", draft=named)
    store, layout = opened.store, opened.shape.experts
    packed = open_draft("auto", opened.checkpoint, store, layout)
    words = published(model, opened)
    for at, exact in enumerate(words):
        layer, expert = divmod(at, layout.num_experts)
        if written is not None:
            exact = ordered(exact, written, (layout.layers[layer], expert))
        assert same_bits(decoded(store, at, packed.expert(at)), exact)
    assert packed.layout.permuted == (written is not None and packing.desc_act)
    with pytest.raises(SpeqError, match="packed as residuals, which only decode with their draft"):
        decoded(store, 0)
    packed.close()
    opened.close()


@pytest.fixture
def source(tiny_bfloat16: Folder) -> Path:
    return tiny_bfloat16("olmoe")


@pytest.fixture
def residual(source: Path, tmp_path: Path) -> Path:
    pack_to(source, tmp_path / "residual", codec="residual").close()
    return tmp_path / "residual"


def tokens_of(model: Path, **options: Any) -> tuple[list[int], dict[str, Any]]:
    generator = Generator.from_pretrained(model, "3MiB", dtype="float32", **options)
    try:
        result = generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    finally:
        generator.close()
    return result.token_ids, result.stats


def test_only_its_own_draft_will_do(source: Path, residual: Path, tmp_path: Path) -> None:
    expected = greedy_tokens(load_plain(source), PROMPT, 24)
    assert tokens_of(residual, draft_length=0)[0] == expected
    # The model it was packed from rounds to the very codes, and so does what its pack holds.
    assert tokens_of(residual, draft=str(source), draft_length=3)[0] == expected
    assert tokens_of(residual, draft=str(residual), draft_length=3)[0] == expected
    assert tokens_of(source, draft=str(residual), codec="raw", draft_length=3)[0] == expected
    with pytest.raises(SpeqError, match="draft is none, and experts of codec residual"):
        tokens_of(residual, draft="none")
    other = write_perturbed(tmp_path / "other", source, noise=0.1)
    with pytest.raises(SpeqError, match="holds residuals of another draft"):
        tokens_of(residual, draft=str(other))
    write_gptq(tmp_path / "gptq", source, Packing(group_size=32))
    with pytest.raises(SpeqError, match="holds residuals of another draft"):
        tokens_of(residual, draft=str(tmp_path / "gptq"))


def test_another_draft_is_refused_before_weights_are_loaded(
    source: Path, residual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a GPTQ checkpoint of the very codes that rounding makes: it is not the pack's own."""

    def fail(*args: object) -> None:
        raise AssertionError("weights are loaded")

    rounded = tmp_path / "rtn"
    quantise_to(rounded, source, replace(SETTINGS, group_size=32, method="rtn"))
    expected = tokens_of(residual, draft_length=3)[0]
    monkeypatch.setattr(moe_model, "load", fail)
    with pytest.raises(SpeqError, match=r"holds residuals of another draft, or its .*; leave the"):
        tokens_of(residual, draft=str(rounded))
    monkeypatch.undo()
    # Packed over that checkpoint, it may be named, and codes are compared all the same.
    pack_to(source, tmp_path / "over", codec="residual", draft=str(rounded)).close()
    assert tokens_of(tmp_path / "over", draft=str(rounded), draft_length=3)[0] == expected
    with pytest.raises(SpeqError, match="holds residuals of another draft"):
        tokens_of(tmp_path / "over", draft=str(source))
    # A pack of an earlier version does not say what it was made from: its codes tell.
    entries = json.loads((residual / "experts.json").read_text())["draft"]
    del entries["source"]
    without_checksums(residual, draft=entries)
    assert tokens_of(residual, draft=str(source), draft_length=3)[0] == expected


def test_a_damaged_draft(residual: Path) -> None:
    path = residual / "draft.bin"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)[0]
        file.seek(size // 2)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(SpeqError, match=r"or its draft\.bin is damaged"):
        tokens_of(residual)
    os.truncate(path, size - 1)
    with pytest.raises(SpeqError, match=f"has {size - 1} bytes and 24 experts take {size}"):
        tokens_of(residual)
    path.unlink()
    with pytest.raises(SpeqError, match=r"draft\.bin cannot be read: No such file"):
        tokens_of(residual)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": None}, "has codec residual and no draft"),
        ({"codec": "raw"}, "has codec raw and a draft"),
        ({"draft": 7}, "is damaged"),
        ({"draft": {"group_size": 7, "permuted": False, "digest": "0"}}, "is damaged"),
        ({"draft": {"group_size": None, "permuted": 1, "digest": "0"}}, "is damaged"),
        ({"draft": {"group_size": None, "permuted": False}}, "is damaged"),
        ({"dtype": "F16"}, "codec residual codes bfloat16 and the model's experts are float16"),
    ],
)
def test_a_damaged_manifest_is_one_sentence(
    residual: Path, change: dict[str, Any], message: str
) -> None:
    without_checksums(residual, **change)
    with pytest.raises(SpeqError, match=message):
        open_model(residual)


def test_records_of_sizes_that_cannot_be(residual: Path) -> None:
    path = residual / "experts.json"
    manifest = json.loads(path.read_text())
    manifest["records"][0][1] = 100
    without_checksums(residual, records=manifest["records"])
    with pytest.raises(SpeqError, match=r"puts a record|has a record of 100 bytes; residual"):
        open_model(residual)


def test_a_flipped_bit_is_found_at_the_read(source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack_to(source, packed, codec="lossless").close()
    manifest = json.loads((packed / "experts.json").read_text())
    for offset, nbytes, _ in manifest["records"]:
        with (packed / "experts.bin").open("r+b") as file:
            file.seek(offset + nbytes // 3)
            byte = file.read(1)[0]
            file.seek(offset + nbytes // 3)
            file.write(bytes([byte ^ 1]))
    for verify_reads in (False, True):
        with pytest.raises(SpeqError, match="is not what was packed; pack the model again"):
            tokens_of(packed, verify_reads=verify_reads)
    data = (packed / "experts.bin").read_bytes()
    for record in manifest["records"]:  # as if it had been packed so
        record[2] = zlib.crc32(data[record[0] : record[0] + record[1]])
    del manifest["crc32"]
    (packed / "experts.json").write_text(json.dumps(seal(manifest)))
    tokens_of(packed)  # wrong words, and nothing worse


MOMENTS = (
    (SafetensorsExpertStore, "read"),
    (record_writer, "crc32_of"),
    (record_writer, "record_of"),
    (packed_dense, "smaller_record"),
    (pack_module, "copy_tensors"),
    (os, "fsync"),
    (os, "replace"),
)
FILES = (
    *("experts.bin", "draft.bin", "dense.bin", "experts.json"),
    *("config.json", "model.safetensors"),
)


@pytest.mark.wide
def test_killed_at_some_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on, to the same bytes."""
    small: dict[str, Any] = {"num_hidden_layers": 1, "num_local_experts": 4}
    source = write_model(tmp_path / "source", "mixtral", torch.bfloat16, **small)
    write_gptq(tmp_path / "draft", source, Packing(desc_act=True, group_size=16))
    monkeypatch.setattr(record_writer, "BATCH_BYTES", 40_000)  # two records

    def work(out: Path) -> None:
        pack_to(source, out, codec="residual", draft=str(tmp_path / "draft")).close()

    work(tmp_path / "whole")
    wanted = {name: (tmp_path / "whole" / name).read_bytes() for name in FILES}
    out, moments, lived = tmp_path / "killed", 0, False
    while not lived:
        moments += 2
        lived = killed_at(moments, MOMENTS, lambda: work(out))
        if (out / "experts.journal").exists() or not (out / "config.json").exists():
            with pytest.raises(SpeqError):
                open_model(out)
            work(out)
        assert {name: (out / name).read_bytes() for name in FILES} == wanted
        shutil.rmtree(out)
    assert moments > 20


def test_an_unfinished_pack_goes_on_as_it_began(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    killed_at(12, MOMENTS, lambda: pack_to(source, out, codec="residual"))
    with pytest.raises(SpeqError, match="holds an unfinished pack of another kind; remove it"):
        pack_to(source, out, codec="lossless")
    other = write_perturbed(tmp_path / "other", source, noise=0.1)
    with pytest.raises(SpeqError, match="holds an unfinished pack of another draft; remove it"):
        pack_to(source, out, codec="residual", draft=str(other))
    pack_to(source, out, codec="residual").close()


@pytest.mark.parametrize("codec", ["lossless", "residual"])
def test_encoded_as_they_are_read(codec: str, source: Path, tmp_path: Path) -> None:
    """The records of a pack, without one."""
    draft = "auto"
    if codec == "residual":
        write_gptq(tmp_path / "draft", source, Packing(desc_act=True, group_size=16))
        draft = str(tmp_path / "draft")
    packed = pack_to(source, tmp_path / "packed", codec=codec, draft=draft)
    plain = open_model(source)
    assert isinstance(plain.store, SafetensorsExpertStore)
    layout = plain.shape.experts
    arena = None
    if codec == "residual":
        drafted = open_draft(draft, plain.checkpoint, plain.store, layout)
        arena = Int4Arena(
            drafted.layout,
            len(layout.layers),
            layout.num_experts,
            torch.device("cpu"),
            keep_orders=True,
        )
        drafted.fill(arena)
        drafted.close()
    store = EncodingStore(plain.store, codec_of(codec, plain.store.codec.shape))
    store.sample(arena)
    count = store.num_layers * store.num_experts
    largest = max(packed.store.record_bytes(*divmod(at, store.num_experts)) for at in range(count))
    assert store.codec.slot_bytes == align(int(1.02 * largest))  # all are among the samples
    ours, theirs = expert_slot(store), expert_slot(packed.store)
    for at in range(count):
        key = divmod(at, store.num_experts)
        assert store.read(*key, ours) >= store.moved_bytes(*key) == plain.store.codec.shape.nbytes
        packed.store.read(*key, theirs)
        nbytes = packed.store.record_bytes(*key)
        assert store.record_bytes(*key) == nbytes
        assert torch.equal(ours[:nbytes], theirs[:nbytes])
    packed.close()
    plain.close()


@pytest.mark.parametrize("fits", [True, False])
def test_host_memory_holds_records(fits: bool, source: Path, tmp_path: Path) -> None:
    opened = pack_to(source, tmp_path / "packed", codec="lossless")
    store = opened.store
    count = store.num_layers * store.num_experts
    limit = (count - (not fits)) * store.codec.slot_bytes
    tier = HostTier.load(store, HostRoom(HostDevice(), limit, readers=2))
    assert tier.resident == fits
    theirs = expert_slot(store)
    for at, key in enumerate(tier.contents):
        store.read(*key, theirs)
        nbytes = tier.record_bytes(*key)
        assert nbytes == store.record_bytes(*key) < store.codec.slot_bytes
        assert torch.equal(tier.record(at)[:nbytes], theirs[:nbytes])
    tier.close()
    opened.close()


def test_what_moves_is_what_was_packed(source: Path, tmp_path: Path) -> None:
    """Records differ in size: the figures are of those that were read."""
    pack_to(source, tmp_path / "packed", codec="lossless").close()
    generator = Generator.from_pretrained(tmp_path / "packed", "900KiB", dtype="float32")
    store = generator.runtime.opened.store
    generator.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    run = generator.last_run
    generator.close()
    assert run is not None
    events = [e for step in run.steps for e in step.events if e.kind == "transfer"]
    assert len({event.moved_bytes for event in events}) > 1
    for event in events:
        assert event.layer is not None
        assert event.expert is not None
        assert event.moved_bytes == store.record_bytes(event.layer, event.expert)


@pytest.mark.parametrize("codec", ["lossless", "residual"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_words_are_refused_by_name(codec: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    message = f"codec {codec} codes bfloat16 and the model's experts are {name}; use codec raw"
    with pytest.raises(SpeqError, match=message):
        codec_of(codec, ExpertShape(64, 32, dtype))
    model = write_model(tmp_path / "model", "olmoe", dtype)
    with pytest.raises(SpeqError, match=message):
        tokens_of(model, codec=codec)
    done = CliRunner().invoke(
        app, ["pack", str(model), "--out", str(tmp_path / "packed"), "--codec", codec]
    )
    assert message in str(done.exception)
    assert not (tmp_path / "packed").exists()


def test_a_packed_model_is_of_its_codec(source: Path, residual: Path, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="codec lossless was asked for and the model is packed"):
        tokens_of(residual, codec="lossless")
    assert tokens_of(residual, codec="residual")[1]["codec"] == "residual"
    lossless = tmp_path / "lossless"
    pack_to(source, lossless, codec="lossless").close()
    assert tokens_of(lossless)[1]["codec"] == "lossless"
    with pytest.raises(SpeqError, match="codec is 'magic'"):
        tokens_of(source, codec="magic")


def test_quantising_out_of_a_pack(source: Path, residual: Path, tmp_path: Path) -> None:
    arguments = ["--method", "rtn", "--samples", "2", "--sequence-length", "32"]
    arguments += ["--group-size", "32", "--memory-budget", "1GiB"]
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question " * 20)
    arguments += ["--calibration", str(text)]
    pack_to(source, tmp_path / "lossless", codec="lossless").close()
    for name, model in (("plain", source), ("packed", tmp_path / "lossless")):
        done = CliRunner().invoke(
            app, ["quantize", str(model), "--out", str(tmp_path / name), *arguments]
        )
        assert done.exit_code == 0, done.exception
    shards = [path.name for path in (tmp_path / "plain").glob("*.safetensors")]
    assert shards
    for shard in shards:
        ours, theirs = ((tmp_path / name / shard).read_bytes() for name in ("packed", "plain"))
        assert ours == theirs
    done = CliRunner().invoke(app, ["quantize", str(residual), *arguments])
    assert "is packed as residuals of a draft; give the one it was" in str(done.exception)


def test_the_pack_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    for arguments, message in (
        (["--codec", "magic"], "codec is 'magic'; it must be one of auto, raw, lossless, residual"),
        (
            ["--codec", "lossless", "--draft", "x/y"],
            "draft 'x/y' cannot be used with codec lossless",
        ),
        (["--codec", "residual", "--draft", "none"], "needs a draft; give one"),
    ):
        done = CliRunner().invoke(app, ["pack", str(source), "--out", str(out), *arguments])
        assert message in str(done.exception)
        assert not out.exists()
    done = CliRunner().invoke(app, ["pack", str(source), "--out", str(out), "--codec", "residual"])
    assert done.exit_code == 0
    store = open_model(out).store
    assert isinstance(store, PackedExpertStore)
    bits = 8 * sum(record.nbytes for record in store.manifest.records) / (24 * 3 * 64 * 32)
    assert f"codec residual, {bits:.2f} bits a weight" in done.stdout
