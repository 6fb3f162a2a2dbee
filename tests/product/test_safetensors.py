"""Files, drafts and expert records, against the safetensors library and plain transformers."""

import json
import logging
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq.drafts import draft_file
from speq.errors import SpeqError
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.int4 import Int4Arena, Int4Layout
from speq.files.atomic_file import replacing
from speq.files.checkpoint import Checkpoint
from speq.files.json_file import read_json
from speq.files.safetensors_file import DTYPES, SafetensorsFile
from speq.kernels import reference
from speq.models.families import family_of
from speq.models.shape import hf_config, shape_of
from tests.helpers.picture_files import stored_tensors
from tests.helpers.tiny_models import (
    BESIDE_PICTURES,
    BIASED,
    BY_FAMILY,
    EXPERTS_BELOW,
    experts_alone,
    experts_of,
    layers_of,
    load_plain,
    matrices_of,
    model_name,
    write_model,
)
from tests.reference.int4 import unpacked

Folder = Callable[[str], Path]
CPU = torch.device("cpu")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits at all, but for bool."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(71)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    words = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator)
    return words.to(torch.uint8).view(dtype).view(shape)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_as_the_library_reads_it(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    path = tmp_path / "file.safetensors"
    shapes = {"matrix": (3, 5), "cube": (2, 3, 4), "one": (1,), "scalar": (), "vector": (17,)}
    tensors = {key: random_tensor(dtype, shape) for key, shape in shapes.items()}
    save_file(tensors, path, metadata={"format": "pt", "note": "näh"})
    library = load_file(path)
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt", "note": "näh"}
        assert set(file.tensors) == set(library)
        assert file.size == path.stat().st_size
        for key, wanted in library.items():
            ours = file.tensor(key)
            assert (ours.dtype, tuple(ours.shape)) == (wanted.dtype, tuple(wanted.shape))
            assert bits(ours) == bits(wanted)
            assert file.tensors[key].nbytes == wanted.nbytes


def test_empty_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"none": torch.empty(0, 4), "some": torch.ones(2)}, path)
    with SafetensorsFile(path) as file:
        assert file.tensor("none").shape == (0, 4)
        assert file.tensor("some").tolist() == [1, 1]


def test_ranges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": random_tensor(torch.uint8, (4096,))}, path)
    content = path.read_bytes()
    with SafetensorsFile(path) as file:
        for offset, count in ((0, 8), (7, 1), (100, 3000), (len(content) - 5, 5)):
            out = torch.full((count,), 7, dtype=torch.uint8)
            file.read_into(offset, out)
            assert bytes(out.tolist()) == content[offset : offset + count]
        with pytest.raises(SpeqError, match=f"ended at byte {len(content)} while it was read"):
            file.read_into(len(content) - 5, torch.empty(6, dtype=torch.uint8))


def test_samples_are_blocks_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": random_tensor(torch.uint8, (100_000,))}, path)
    content = path.read_bytes()
    with SafetensorsFile(path) as file:
        blocks = list(file.samples(8))
    assert len(blocks) == 8
    assert blocks[0] == content[:4096]
    assert blocks[-1] == content[-4096:]
    at = [content.index(block) for block in blocks]
    assert at == sorted(at)
    assert max(b - a for a, b in pairwise(at)) < len(content) / 6


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(**changes: Any) -> bytes:
    """A header of one float32 tensor of two elements, changed."""
    return json.dumps(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}
    ).encode()


def pair(first: list[int], second: list[int]) -> bytes:
    """A header of two float32 tensors of two elements, at these ranges."""
    tensor = {"dtype": "F32", "shape": [2]}
    ranges = {"a": first, "b": second}
    return json.dumps({name: tensor | {"data_offsets": at} for name, at in ranges.items()}).encode()


GOOD = entry()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a complete safetensors file"),
        (b"\x08\x00\x00", r"is not a complete safetensors file"),
        (file_of(GOOD, length=10**6), r"its header should take 1000000 bytes and the file has"),
        (file_of(GOOD, length=2**63), r"its header should take 9223372036854775808 bytes"),
        (file_of(b"{not json"), r"has a corrupt safetensors header"),
        (file_of(b"\xff\xfe{}"), r"has a corrupt safetensors header"),
        (file_of(b"[1, 2]"), r"has a corrupt safetensors header"),
        (file_of(b'{"a": 3}'), r"has a corrupt safetensors header"),
        (file_of(b'{"a": {"dtype": "F32"}}'), r"tensor a has shape None and data_offsets None"),
        (file_of(b"[" * 100_000), r"has a corrupt safetensors header"),
        (file_of(b'{"__metadata__": null, "a": 1}'), r"has a corrupt safetensors header"),
        (file_of(b'{"__metadata__": [1]}'), r"has a corrupt safetensors header"),
        (file_of(entry(dtype="F4"), bytes(8)), r"tensor a has dtype F4, which is not supported"),
        (file_of(entry(dtype=["F32"]), bytes(8)), r"tensor a has dtype \['F32'\], which is not"),
        (
            file_of(entry(shape=[3]), bytes(12)),
            r"shape \[3\] needs 12 bytes but is given .* 0 to 8",
        ),
        (file_of(entry(shape=[-2]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(entry(shape=[-1, -2]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(entry(shape=[float("inf")]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(entry(data_offsets=[-8, 0]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(entry(data_offsets=[0, 4, 8]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(entry(data_offsets=[8, 0]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(GOOD, bytes(7)), r"is truncated: tensor a ends at byte"),
        (file_of(GOOD, bytes(9)), r"has a corrupt safetensors header"),
        (file_of(pair([0, 8], [4, 12]), bytes(12)), r"has a corrupt safetensors header"),
        (file_of(pair([0, 8], [12, 20]), bytes(20)), r"has a corrupt safetensors header"),
        (file_of(pair([0, 8], [0, 8]), bytes(8)), r"has a corrupt safetensors header"),
        (file_of(pair([8, 16], [16, 24]), bytes(24)), r"has a corrupt safetensors header"),
    ],
)
def test_damaged_files_are_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpeqError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass


def test_file_at_its_bounds_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(file_of(GOOD, struct.pack("<2f", 1.5, -2.0)))
    with SafetensorsFile(path) as file:
        assert file.tensor("a").tolist() == [1.5, -2.0]


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"none\.safetensors cannot be read: No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


def open_store(path: Path) -> tuple[Checkpoint, SafetensorsExpertStore]:
    family = family_of(read_json(path / "config.json"), path)
    checkpoint = Checkpoint(path, family.text_part)
    shape = shape_of(family, hf_config(checkpoint), path)
    return checkpoint, SafetensorsExpertStore(checkpoint, shape.experts)


# Where each family's checkpoint keeps an expert, and its gate, up and down projections.
OWN_NAMES = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "phimoe": ("model.layers.{}.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "minimax_m2": ("model.layers.{}.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "gemma4": (f"{EXPERTS_BELOW['gemma4']}.{{}}.", ("gate_proj", "up_proj", "down_proj")),
    "lfm2_moe": (f"{EXPERTS_BELOW['lfm2_moe']}.{{}}.", ("w1", "w3", "w2")),
    **dict.fromkeys(
        ("kimi_linear", "minimax_m3_vl", "deepseek_v4"),
        ("model.layers.{}.mlp.experts.{}.", ("w1", "w3", "w2")),
    ),
    "nemotron_h": (f"{EXPERTS_BELOW['nemotron_h']}.{{}}.", ("up_proj", "down_proj")),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid"),
        (f"{EXPERTS_BELOW['granitemoe']}.{{}}.", ("gate_proj", "up_proj", "down_proj")),
    ),
}
USUAL_NAMES = ("model.layers.{}.mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj"))
MOE_LAYERS = {
    "qwen2_moe": (0, 2),
    "qwen3_vl_moe": (0, 2),
    "deepseek_v2": (1, 2),
    "glm4_moe": (1, 2),
    "glm4v_moe": (1, 2),
    "glm4_moe_lite": (1, 2),
    "deepseek_v3": (1, 2),
    "deepseek_v32": (1, 2),
    "glm_moe_dsa": (1, 2),
    "glm5_next": (1, 2),
    "dots1": (1, 2),
    "ernie4_5_moe": (1, 2),
    "hy_v3": (1, 2),
    "afmoe": (1, 2),
    "exaone_moe": (1, 2),
    "laguna": (1, 2),
    "step3p7": (1, 2),
    "lfm2_moe": (1, 2),
    "nemotron_h": (1, 3),
    "kimi_linear": (1, 2),
    "minimax_m3_vl": (1, 2),
    "bailing_hybrid": (1, 2),
    "mistral4": (1, 2),
    "kimi_k25": (1, 2),
    "mimo_v2_flash": (1, 2),
    "sarvam_moe": (1, 2),
    "sarvam_mla": (1, 2),
}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_records_are_the_experts_of_the_file(family: str, tiny: Folder) -> None:
    path = tiny(family)
    prefix, projections = OWN_NAMES.get(family, USUAL_NAMES)
    layers = MOE_LAYERS.get(family, (0, 1, 2))
    checkpoint, store = open_store(path)
    assert store.num_layers == len(layers)
    seen = set()
    stored = stored_tensors(path)
    alone = experts_alone(stored)
    for at, layer in enumerate(layers):
        for expert in range(store.num_experts):
            names = [
                f"{prefix.format(layer, expert)}{projection}.weight" for projection in projections
            ]
            seen.update(names)
            *gate_up, down = (alone[name] for name in names)
            record = torch.full_like(expert_slot(store), 255)
            store.read(at, expert, record)
            gate_up_proj, down_proj = store.codec.decode(record)
            assert torch.equal(gate_up_proj, torch.cat(gate_up))
            assert torch.equal(down_proj, down)
    # Nothing of the routed experts is left unread, and nothing else is taken for one.
    seen = (seen & stored.keys()) | (stored.keys() - alone.keys())
    assert {name for name in stored if store.names.is_expert(model_name(name))} == seen
    biases = {name for name in stored if name.endswith(".experts.gate_up_proj_bias")}
    biases |= {name for name in stored if name.endswith(".experts.down_proj_bias")}
    assert len(biases) == (2 * len(layers) if family in BIASED else 0)
    left = [name for name in stored.keys() - seen - biases if ".experts." in name]
    assert all(name.startswith("mtp.") for name in left)
    assert bool(left) == (family in BESIDE_PICTURES)
    checkpoint.close()


def plain_experts(path: Path) -> list[tuple[Tensor, Tensor]]:
    """gate_up_proj and down_proj of every expert, as transformers loads them."""
    model = load_plain(path)
    return [
        matrices_of(experts, at)
        for layer in layers_of(model)
        if (experts := experts_of(layer)) is not None
        for at in range(len(experts.down_proj))
    ]


def empty_arena(store: SafetensorsExpertStore) -> Int4Arena:
    shape = store.codec.shape
    layout = Int4Layout(shape.hidden_size, shape.expert_width, gated=shape.gated)
    arena = Int4Arena(layout, store.num_layers, store.num_experts, CPU)
    for part in arena.parts.values():
        part.view(torch.uint8).fill_(255)
    return arena


@pytest.mark.parametrize("family", BY_FAMILY)
def test_records_and_draft_match_transformers(family: str, tiny: Folder) -> None:
    path = tiny(family)
    checkpoint, store = open_store(path)
    arena = empty_arena(store)
    told: list[tuple[int, int]] = []
    draft_file.quantize(arena, store, lambda done, total: told.append((done, total)))
    experts = plain_experts(path)
    total = store.num_layers * store.num_experts
    assert len(experts) == total
    assert told == [(done, total) for done in range(1, total + 1)]
    record = expert_slot(store)
    for at, (gate_up, down) in enumerate(experts):
        layer, expert = divmod(at, store.num_experts)
        store.read(layer, expert, record)
        ours = store.codec.decode(record)
        assert torch.equal(ours[0], gate_up)
        assert torch.equal(ours[1], down)
        slot = int(arena.base_slots[layer, expert])
        for matrix, (codes, scales) in (
            (gate_up, arena.experts.gate_up),
            (down, arena.experts.down),
        ):
            group = matrix.shape[1] // scales.shape[2]
            wanted_codes, wanted_scales = reference.quantize_int4(matrix, group)
            assert torch.equal(codes[slot], wanted_codes)
            assert torch.equal(scales[slot], wanted_scales)
    checkpoint.close()


def test_shards_are_read_like_one_file(tiny: Folder, tmp_path: Path) -> None:
    sharded = write_model(tmp_path / "sharded", "qwen3_moe", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    whole, whole_store = open_store(tiny("qwen3_moe"))
    parts, parts_store = open_store(sharded)
    one, other = expert_slot(whole_store), expert_slot(parts_store)
    for layer in range(whole_store.num_layers):
        for expert in range(whole_store.num_experts):
            whole_store.read(layer, expert, one)
            parts_store.read(layer, expert, other)
            assert torch.equal(one, other)
    whole.close()
    parts.close()


def without(path: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with changed tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(UP),
            r"lacks up_proj of expert 3 in layer 1; config\.json has 8 experts",
        ),
        (
            lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()[:, :7].contiguous()}),
            rf"tensor {UP} is torch\.float32 \[64, 7\]; config\.json and the other experts make it",
        ),
        (
            lambda tensors: tensors.update({UP: tensors[UP].bfloat16()}),
            rf"tensor {UP} is torch\.bfloat16 \[32, 64\]; .* make it torch\.float32 \[32, 64\]",
        ),
        (
            lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n],
            r"holds no expert tensors such as model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight",
        ),
        (
            lambda tensors: tensors.update({UP: torch.zeros(32, 64, dtype=torch.int8)}),
            rf"tensor {UP} has dtype torch\.int8; exact weights are bfloat16, float16",
        ),
    ],
)
def test_incomplete_experts_are_refused(
    change: Callable[[dict[str, Tensor]], None], message: str, tiny: Folder, tmp_path: Path
) -> None:
    path = without(tiny("qwen3_moe"), tmp_path / "changed", change)
    with pytest.raises(SpeqError, match=message):
        open_store(path)


def filled_arena(seed: int = 1) -> Int4Arena:
    arena = Int4Arena(Int4Layout(64, 48), 2, 3, CPU)
    generator = torch.Generator().manual_seed(seed)
    for part in arena.parts.values():
        words = part.view(torch.uint8)
        words.copy_(torch.randint(0, 256, words.shape, generator=generator))
    return arena


def same_bits(one: Int4Arena, other: Int4Arena) -> bool:
    return all(
        torch.equal(part.view(torch.uint8), other.parts[name].view(torch.uint8))
        for name, part in one.parts.items()
    )


def test_draft_file_round_trip(tmp_path: Path) -> None:
    arena = filled_arena()
    path = tmp_path / "sub" / "draft.safetensors"
    draft_file.write(arena.parts, path)
    assert [file.name for file in path.parent.iterdir()] == ["draft.safetensors"]
    # Any reader of the format understands it.
    library = load_file(path)
    assert set(library) == set(arena.parts)
    for name, part in arena.parts.items():
        assert library[name].dtype == part.dtype
        assert bits(library[name]) == bits(part)
    again = filled_arena(seed=2)
    assert not same_bits(again, arena)
    draft_file.read(again.parts, path)
    assert same_bits(again, arena)


def test_drafts_of_another_shape_or_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    draft_file.write(filled_arena().parts, path)
    for layout, layers, experts in (
        (Int4Layout(64, 48), 2, 4),
        (Int4Layout(64, 32), 2, 3),
        (Int4Layout(32, 48), 2, 3),
    ):
        other = Int4Arena(layout, layers, experts, CPU)
        with pytest.raises(SpeqError, match=r"draft\.safetensors holds no gate_up_qweight of sha"):
            draft_file.read(other.parts, path)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(2)}, foreign)
    with pytest.raises(SpeqError, match=r"foreign\.safetensors is not a draft of format speq-int4"):
        draft_file.read(filled_arena().parts, foreign)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(SpeqError, match="is truncated"):
        draft_file.read(filled_arena().parts, path)


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("existing", [b"older content", None])
def test_failed_replacement_leaves_things_as_they_were(
    error: BaseException, existing: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if existing is not None:
        path.write_bytes(existing)

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half of the new")
            file.flush()
            assert path.exists() == (existing is not None)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == (["file"] if existing else [])
    assert existing is None or path.read_bytes() == existing


def test_replacement_takes_the_files_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older content, longer than the new")
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_draft_is_made_once_and_kept(tiny: Folder, tmp_path: Path) -> None:
    path = without(tiny("olmoe"), tmp_path / "model", lambda tensors: None)
    checkpoint, store = open_store(path)
    made, again = empty_arena(store), empty_arena(store)
    draft_file.load_or_make(made, checkpoint, store)
    (kept,) = (path / ".speq").iterdir()
    assert kept == draft_file.candidate_paths(checkpoint)[0]

    told: list[tuple[int, int]] = []
    steps = store.num_layers * store.num_experts + 1  # the last one keeps what was made
    draft_file.load_or_make(again, checkpoint, store, lambda *so_far: told.append(so_far))
    assert steps not in {total for _, total in told}
    assert told[-1][0] == told[-1][1] == sum(part.nbytes for part in made.parts.values()) >> 20
    assert same_bits(made, again)

    # A damaged one is made anew.
    content = kept.read_bytes()
    kept.write_bytes(content[:100])
    once_more = empty_arena(store)
    told.clear()
    draft_file.load_or_make(once_more, checkpoint, store, lambda *so_far: told.append(so_far))
    assert told == [(done, steps) for done in range(1, steps + 1)]
    assert same_bits(made, once_more)
    assert kept.read_bytes() == content
    checkpoint.close()


def test_draft_goes_elsewhere_where_the_model_cannot_be_written(
    tiny: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = without(tiny("olmoe"), tmp_path / "model", lambda tensors: None)
    (path / ".speq").write_text("a file where the folder should be")
    drafts = tmp_path / ".cache" / "speq" / "drafts"
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint, store = open_store(path)
    arena = empty_arena(store)
    draft_file.load_or_make(arena, checkpoint, store)
    (kept,) = drafts.iterdir()
    read_back = empty_arena(store)
    draft_file.read(read_back.parts, kept)
    assert same_bits(arena, read_back)

    # Where neither place takes it, the draft serves this run all the same, and that is said.
    kept.unlink()
    drafts.rmdir()
    drafts.write_text("in the way")
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    unkept = empty_arena(store)
    draft_file.load_or_make(unkept, checkpoint, store)
    assert same_bits(arena, unkept)
    assert "the draft could not be cached" in caplog.text
    checkpoint.close()


def test_digest_changes_with_any_weight(tiny: Folder, tmp_path: Path) -> None:
    def digest_after(name: str, change: Callable[[dict[str, Tensor]], None]) -> str:
        path = without(tiny("olmoe"), tmp_path / name, change)
        checkpoint = Checkpoint(path)
        digest = draft_file.digest_of(checkpoint)
        checkpoint.close()
        return digest

    def retrained(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor += 1e-3

    same = digest_after("same", lambda tensors: None)
    assert digest_after("copy", lambda tensors: None) == same
    assert digest_after("retrained", retrained) != same
    assert (
        digest_after("renamed", lambda tensors: tensors.update(x=tensors.pop(next(iter(tensors)))))
        != same
    )


def test_draft_of_the_file_is_what_the_kernels_unpack(tiny: Folder) -> None:
    """From file to dequantised weights: within half a step of transformers' own."""
    path = tiny("mixtral")
    checkpoint, store = open_store(path)
    arena = empty_arena(store)
    draft_file.quantize(arena, store)
    for slot, (gate_up, down) in enumerate(plain_experts(path)):
        for matrix, (codes, scales) in (
            (gate_up, arena.experts.gate_up),
            (down, arena.experts.down),
        ):
            values = torch.from_numpy(unpacked(codes[slot].numpy(), scales[slot].numpy()))
            group = matrix.shape[1] // scales.shape[2]
            steps = scales[slot].float().repeat_interleave(group, dim=1)
            assert ((values - matrix).abs() <= steps * (0.5 + 7 * 2**-10)).all()
    checkpoint.close()


def test_files_are_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(2)}, path)
    opened: list[int] = []
    really_open = os.open

    def noted(*arguments: Any) -> int:
        opened.append(really_open(*arguments))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    file = SafetensorsFile(path)
    file.close()
    file.close()
    with pytest.raises(SpeqError, match="Bad file descriptor"):
        file.read_into(0, torch.empty(8, dtype=torch.uint8))
    path.write_bytes(b"")
    with pytest.raises(SpeqError, match="is not a complete"):
        SafetensorsFile(path)
    assert len(opened) == 4  # each file through the page cache and past it
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
