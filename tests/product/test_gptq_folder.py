"""GPTQ folders as drafts: a real package's, a second implementation's, and bad ones."""

import hashlib
import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import speq
from speq import Generator, SpeqError
from speq import load as loading
from speq.config import RunConfig
from speq.drafts import draft_source
from speq.drafts.gptq_folder import GptqFolder
from speq.experts.expert_store import ExpertLayout
from speq.experts.int4 import Int4Arena
from speq.files.checkpoint import Checkpoint
from speq.kernels import ops, reference
from speq.models.families import MIXTRAL_NAMES
from speq.models.opened import open_model
from speq.runtime import Runtime
from tests.helpers import gptq_files
from tests.helpers.expert_problems import SILU
from tests.helpers.gptq_files import Packing, Written, write_gptq
from tests.helpers.paths import DATA
from tests.helpers.tiny_models import (
    BIASED,
    BY_FAMILY,
    FAMILIES,
    greedy_tokens,
    load_plain,
    write_model,
)
from tests.reference.int4 import rounded, unpacked

FOLDERS = DATA / "gptq"
CPU = torch.device("cpu")
Folder = Callable[[str], Path]
BUDGET = "64MiB"
PROMPT_IDS = [5, 9, 200, 31, 77, 12]


def load(path: Path, experts: ExpertLayout) -> Int4Arena:
    folder = GptqFolder(path, experts)
    arena = Int4Arena(folder.layout, len(experts.layers), experts.num_experts, CPU)
    for part in arena.parts.values():
        part.view(torch.uint8).fill_(255)
    folder.fill(arena)
    folder.close()
    return arena


def order_of(g_idx: np.ndarray) -> np.ndarray:
    return np.argsort(g_idx, kind="stable")


def unloaded(arena: Int4Arena, base_slot: int, down_order: np.ndarray) -> dict[str, np.ndarray]:
    """Weights [N, K] in float16 by projection, in the order the model has them."""
    backend = arena.experts
    gate_up, down = (
        unpacked(codes[base_slot].numpy(), scales[base_slot].numpy())
        for codes, scales in (backend.gate_up, backend.down)
    )
    parts = np.split(gate_up, len(gate_up) // len(down_order))
    for part in parts:
        part[down_order] = part.copy()
    if backend.input_perm is not None:
        perm = backend.input_perm[base_slot].numpy()
        gate_up[:, perm] = gate_up.copy()
    down[:, down_order] = down.copy()
    names = ("gate_proj", "up_proj")[-len(parts) :]
    whole = {**dict(zip(names, parts, strict=True)), "down_proj": down}
    return {name: np.ascontiguousarray(value.astype(np.float16)) for name, value in whole.items()}


# Real packages.


@pytest.mark.parametrize("name", ["v1", "v2-desc-act"])
def test_weights_of_gptqmodel(name: str) -> None:
    """As gptqmodel itself dequantises them, bit for bit."""
    digests = json.loads((FOLDERS / name / "digests.json").read_text())
    experts = ExpertLayout((0, 1), 4, 64, 64)
    arena = load(FOLDERS / name, experts)
    assert ("input_perm" in arena.parts) == (name == "v2-desc-act")
    tensors = load_file(FOLDERS / name / "model.safetensors")
    seen = 0
    for layer, expert in product(range(2), range(4)):
        module = f"model.layers.{layer}.mlp.experts.{expert}"
        order = order_of(tensors[f"{module}.down_proj.g_idx"].numpy())
        for projection, weight in unloaded(arena, 4 * layer + expert, order).items():
            digest = hashlib.sha256(weight.tobytes()).hexdigest()
            assert digest == digests[f"{module}.{projection}"]
            seen += 1
    assert seen == len(digests) == 24


@pytest.mark.parametrize("name", ["v1", "v2-desc-act"])
def test_a_draft_of_gptqmodel_generates(name: str, tmp_path: Path) -> None:
    """A model with its routers and embeddings and, for experts, its own moved a little."""
    model = write_model(
        tmp_path / "model", "qwen2_moe", dtype=torch.bfloat16, num_hidden_layers=2, num_experts=4,
        mlp_only_layers=[], moe_intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    packed = load_file(FOLDERS / name / "model.safetensors")
    exact = load_file(model / "model.safetensors")
    for tensor in exact:
        if ".experts." in tensor:
            module = tensor.removesuffix(".weight")
            parts = {f: packed[f"{module}.{f}"].numpy() for f in gptq_files.FIELDS}
            weight = gptq_files.dequantised(parts, 1 if name == "v1" else 2)
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.01
            exact[tensor] = (torch.from_numpy(weight).float() + noise).to(torch.bfloat16)
        elif tensor in packed:
            exact[tensor] = packed[tensor]
    save_file(exact, model / "model.safetensors", metadata={"format": "pt"})
    wanted = greedy_tokens(load_plain(model), PROMPT_IDS, 24)
    tokens, stats = generated(model, str(FOLDERS / name), draft_dense="none")
    assert tokens == wanted
    # Half of what is accepted by experts that lie this near; by wrong ones, next to nothing.
    assert stats["acceptance_rate"] > 0.5


def generated(
    model: Path, draft: str, new_tokens: int = 24, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    generator = Generator.from_pretrained(
        model, BUDGET, draft=draft, dtype="float32", **{"draft_length": 3} | options
    )
    result = generator.generate(PROMPT_IDS, max_new_tokens=new_tokens, ignore_eos=True)
    assert result.stats["draft_length_mean"] > 0
    generator.close()
    return result.token_ids, result.stats


# The second implementation.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of two experts, with rows of several groups of 128."""
    return write_model(
        tmp_path_factory.mktemp("small") / "model", "qwen2_moe", num_hidden_layers=1,
        hidden_size=256, moe_intermediate_size=128, num_experts=2, num_experts_per_tok=1,
        mlp_only_layers=[],
    )  # fmt: skip


SMALL = ExpertLayout((0,), 2, 256, 128, MIXTRAL_NAMES)


def check_weights(arena: Int4Arena, written: Written, experts: ExpertLayout, version: int) -> None:
    places = product(experts.layers, range(experts.num_experts))
    for base_slot, (layer, expert) in enumerate(places):
        order = order_of(written[layer, expert, "down_proj"]["g_idx"])
        for projection, weight in unloaded(arena, base_slot, order).items():
            wanted = gptq_files.dequantised(written[layer, expert, projection], version)
            assert np.array_equal(weight, wanted), (layer, expert, projection)


@pytest.mark.parametrize(
    ("version", "desc_act", "group_size"),
    list(product([1, 2], [False, True], [32, 64, 128, 256, -1])),
)
def test_all_settings(
    version: int, desc_act: bool, group_size: int, small: Path, tmp_path: Path
) -> None:
    packing = Packing(version, desc_act, group_size)
    written = write_gptq(tmp_path / "draft", small, packing)
    arena = load(tmp_path / "draft", SMALL)
    assert ("input_perm" in arena.parts) == (desc_act and group_size not in (256, -1))
    size = 256 if group_size == -1 else group_size
    assert arena.parts["gate_up_scales"].shape == (2, 256, 256 // size)
    assert arena.parts["down_scales"].shape == (2, 256, 128 // min(size, 128))
    check_weights(arena, written, SMALL, version)


@pytest.mark.parametrize(
    ("names", "files"),
    list(product(["new", "old", "fused", "stacked"], ["single", "sharded", "autogptq"])),
)
@pytest.mark.parametrize("desc_act", [False, True])
def test_all_names(names: str, files: str, desc_act: bool, small: Path, tmp_path: Path) -> None:
    packing = Packing(1, desc_act, 64, names, files)
    written = write_gptq(tmp_path / "draft", small, packing)
    check_weights(load(tmp_path / "draft", SMALL), written, SMALL, 1)


def test_an_index_of_autogptq(small: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    written = write_gptq(draft, small, Packing(files="sharded"))
    for path in draft.glob("model*"):
        path.rename(draft / path.name.replace("model", "gptq_model-4bit-32g", 1))
    index = draft / "gptq_model-4bit-32g.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"gptq_model-4bit-32g-'))
    check_weights(load(draft, SMALL), written, SMALL, 1)


@pytest.mark.parametrize("given", ["absent", "empty"])
def test_without_g_idx(given: str, small: Path, tmp_path: Path) -> None:
    written = write_gptq(tmp_path / "draft", small, Packing())
    change(tmp_path / "draft", lambda name, tensor: None if given == "absent" else tensor[:0],
           "g_idx")  # fmt: skip
    check_weights(load(tmp_path / "draft", SMALL), written, SMALL, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_another_dtype(dtype: torch.dtype, small: Path, tmp_path: Path) -> None:
    """Where float16 can hold them all."""
    write_gptq(tmp_path / "draft", small, Packing())
    change(tmp_path / "draft", lambda name, tensor: tensor.to(torch.bfloat16).half(), "scales")
    halves = load(tmp_path / "draft", SMALL)
    change(tmp_path / "draft", lambda name, tensor: tensor.to(dtype), "scales")
    other = load(tmp_path / "draft", SMALL)
    for name, part in halves.parts.items():
        assert torch.equal(part, other.parts[name])


def test_settings_that_may_be_left_out(small: Path, tmp_path: Path) -> None:
    written = write_gptq(tmp_path / "draft", small, Packing())
    gptq_files.edit(tmp_path / "draft", sym=None, quant_method=None, checkpoint_format=None)
    check_weights(load(tmp_path / "draft", SMALL), written, SMALL, 1)
    # All zero points are 8, whatever sym says.
    gptq_files.edit(tmp_path / "draft", sym=False, format="gptq", pack_dtype="int32")
    check_weights(load(tmp_path / "draft", SMALL), written, SMALL, 1)


def test_biases_that_are_zero(small: Path, tmp_path: Path) -> None:
    written = write_gptq(tmp_path / "draft", small, Packing())
    add_biases(tmp_path / "draft", 0.0)
    check_weights(load(tmp_path / "draft", SMALL), written, SMALL, 1)


def add_biases(draft: Path, value: float) -> None:
    tensors = load_file(draft / "model.safetensors")
    for name in [name for name in tensors if name.endswith("scales")]:
        bias = torch.full((tensors[name].shape[1],), value, dtype=torch.float16)
        tensors[name.replace("scales", "bias")] = bias
    save_file(tensors, draft / "model.safetensors")


def change(
    draft: Path, edit: Callable[[str, Tensor], Tensor | None], *parts: str, first: str = ""
) -> None:
    """Change tensors whose names end in one of `parts` and hold `first`; None takes them out."""
    tensors = load_file(draft / "model.safetensors")
    for name in list(tensors):
        if name.endswith(parts) and first in name:
            edited = edit(name, tensors.pop(name))
            if edited is not None:
                tensors[name] = edited.contiguous()
    save_file(tensors, draft / "model.safetensors")


# Kernels.


def shuffled_and_rounded(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """As INT4 products see inputs in another order, put back where they were."""
    out = np.empty_like(values)
    out[order] = rounded(values[order])
    return out


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("desc_act", [False, True])
def test_kernels_give_what_dequantised_weights_give(
    group_size: int, desc_act: bool, small: Path, tmp_path: Path
) -> None:
    """A value on the edge between two INT8 codes may go either way: one step of one input."""
    written = write_gptq(tmp_path / "draft", small, Packing(2, desc_act, group_size))
    arena = load(tmp_path / "draft", SMALL)
    hidden = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    ids, weights = torch.tensor([[0], [1]] * 3), torch.full((6, 1), 0.75)
    wanted = np.zeros((6, 256))
    for token, (expert,) in enumerate(ids.tolist()):
        projections = ("gate_proj", "up_proj", "down_proj")
        parts = [written[0, expert, projection] for projection in projections]
        gate, up, down = (gptq_files.dequantised(each, 2, np.float64) for each in parts)
        x = shuffled_and_rounded(hidden[token].double().numpy(), order_of(parts[0]["g_idx"]))
        inner = gate @ x / (1 + np.exp(-(gate @ x))) * (up @ x)
        wanted[token] = 0.75 * (down @ shuffled_and_rounded(inner, order_of(parts[2]["g_idx"])))
    slots, backend = arena.base_slots[0], arena.experts
    plain = torch.full((6, 256), torch.nan)
    reference.moe_int4_out(
        hidden,
        ids,
        weights,
        slots,
        *backend.gate_up,
        *backend.down,
        backend.input_perm,
        SILU,
        plain,
    )
    fused = ops.moe_int4(hidden, ids, weights, slots, backend, SILU)
    unfused = ops.moe_int4_unfused(hidden, ids, weights, slots, backend, SILU)
    for ours in (plain, fused, unfused):
        error = np.abs(ours.numpy() - wanted).max(1) / wanted.std()
        assert (error < 1e-5).sum() >= 4
        assert error.max() < 0.05


# Generation.


@pytest.mark.parametrize("family", BY_FAMILY)
def test_tokens_are_the_exact_models(family: str, tiny: Folder, tmp_path: Path) -> None:
    """Shapes of every family, inputs out of order or shards, old names where there are some."""
    odd, old = FAMILIES.index(family) % 2 == 1, family in ("mixtral", "phimoe")
    model = tiny(family)
    packing = Packing(
        version=1 + odd, desc_act=not odd and family not in BIASED, group_size=16,
        names="old" if old else "new",
        files="sharded" if odd else "single",
    )  # fmt: skip
    written = write_gptq(tmp_path / "draft", model, packing)
    opened = open_model(model)
    check_weights(load(tmp_path / "draft", opened.shape.experts), written, opened.shape.experts,
                  packing.version)  # fmt: skip
    opened.close()
    wanted = greedy_tokens(load_plain(model), PROMPT_IDS, 24)
    tokens, stats = generated(model, str(tmp_path / "draft"), draft_dense="none")
    assert tokens == wanted
    assert 0.2 < stats["acceptance_rate"] <= 1
    # Random attention suffers most by rounding: in some families hardly a draft is accepted.
    assert generated(model, str(tmp_path / "draft"), draft_dense="all")[0] == wanted
    assert not [*tmp_path.rglob(".speq")]


def test_the_plan_knows_what_the_draft_takes(small: Path, tmp_path: Path) -> None:
    taken = {}
    for name, packing, dense in (
        ("plain", Packing(1, False, 32), "none"),
        ("permuted", Packing(1, True, 32), "none"),
        ("one group", Packing(1, True, -1), "none"),
        ("dense", Packing(1, False, 32), "auto"),
    ):
        write_gptq(tmp_path / name, small, packing)
        config = RunConfig.of(BUDGET, draft=tmp_path / name, draft_dense=dense)
        runtime = Runtime(loading.load(open_model(small), config))
        assert runtime.draft_backend is not None
        taken[name] = runtime.plan.items["draft"]
        runtime.close()
    codes, weights = 2 * 3 * 256 * 128 // 2, 2 * 3 * 256 * 128
    assert taken["plain"] == codes + 2 * weights // 32
    assert taken["permuted"] == taken["plain"] + 2 * 4 * 256
    assert taken["one group"] == codes + 2 * 2 * (2 * 128 + 256)
    # Rounded layers have groups of 128 columns, or of all where there are fewer.
    attention, gate_up, down, head = 3 * 256 * 256, 2 * 64 * 256, 256 * 64, 264 * 256
    dense_codes = (attention + gate_up + down) // 2 + head
    dense_groups = (attention + gate_up) // 128 + down // 64 + 2 * head // 128
    assert taken["dense"] == taken["plain"] + dense_codes + 2 * dense_groups


def test_auto_takes_the_checkpoint_beside_the_model(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gptq_files.copy_folder(tiny("olmoe"), tmp_path / "model")
    beside = draft_source.gptq_path(model)
    assert beside == model / ".speq" / "gptq"
    write_gptq(beside, model, Packing())
    told: list[tuple[str, int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(Int4Arena, "quantize_into", None)  # nothing is rounded
        tokens, _ = generated(
            model, "auto", draft_dense="none", progress=lambda *report: told.append(report)
        )
    assert tokens == greedy_tokens(load_plain(model), PROMPT_IDS, 24)
    drafted = [report for report in told if report[0] == "loading the GPTQ draft"]
    assert drafted == [("loading the GPTQ draft", at, 24) for at in range(1, 25)]
    assert [path.name for path in (model / ".speq").iterdir()] == ["gptq"]
    # One that is there and does not fit is no reason to round in silence.
    gptq_files.edit(beside, bits=8)
    with pytest.raises(SpeqError, match=r"\.speq/gptq has bits 8, and only 4 are read here"):
        generated(model, "auto")
    # One that is still being written is none.
    (beside / "config.json").unlink()
    assert generated(model, "auto")[0] == tokens


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_pack_brings_the_checkpoint_along(
    codec: str, tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is there as a whole, nothing opens the pack."""
    model, out = (
        gptq_files.copy_folder(tiny_bfloat16("olmoe"), tmp_path / "model"),
        tmp_path / "out",
    )
    beside = draft_source.gptq_path(model)
    write_gptq(beside, model, Packing())
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            speq.pack(model, out, codec=codec)
    with pytest.raises(SpeqError):
        open_model(out)
    speq.pack(model, out, codec=codec)
    copied = draft_source.gptq_path(out)
    assert contents(copied) == contents(beside)
    tokens, _ = generated(model, "auto")
    assert generated(out, "auto", packed_copy="none")[0] == tokens
    # One that is not whole stays behind.
    (beside / "config.json").unlink()
    speq.pack(model, tmp_path / "other", codec=codec)
    assert not draft_source.gptq_path(tmp_path / "other").exists()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_rounding_is_said_once(
    tiny: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gptq_files.copy_folder(tiny("olmoe"), tmp_path / "model")
    with caplog.at_level(logging.INFO, logger="speq"):
        generated(model, "auto")
        assert f"`speq quantize {model}` makes a better one (GPTQ)" in caplog.text
        caplog.clear()
        generated(model, "auto")
        assert "speq quantize" not in caplog.text


def test_a_draft_from_the_hub(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gptq(tmp_path / "snapshot", tiny("olmoe"), Packing())
    asked = []

    def download(
        name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((name, revision))
        assert "*/*.safetensors" in ignore_patterns
        assert {"*.json", "*.safetensors"} <= set(allow_patterns)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    generated(tiny("olmoe"), "somebody/olmoe-gptq")
    tokens, _ = generated(tiny("olmoe"), "somebody/olmoe-gptq@v1.2")
    assert asked == [("somebody/olmoe-gptq", None), ("somebody/olmoe-gptq", "v1.2")]
    assert tokens == greedy_tokens(load_plain(tiny("olmoe")), PROMPT_IDS, 24)


def test_an_interrupt_while_loading_leaves_nothing(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gptq(tmp_path / "draft", tiny("olmoe"), Packing())
    before = sorted(path for path in tmp_path.rglob("*"))
    closed = []
    close = GptqFolder.close
    monkeypatch.setattr(
        GptqFolder, "close", lambda folder: (closed.append(folder.path), close(folder))
    )

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(tiny("olmoe"), str(tmp_path / "draft"), progress=interrupt)
    assert closed == [tmp_path / "draft"]
    assert sorted(path for path in tmp_path.rglob("*")) == before


# What is refused. Each case: how the folder is damaged, and what the sentence says.


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda draft: gptq_files.edit(draft, **changes)


def config(**changes: Any) -> Callable[[Path], None]:
    def apply(draft: Path) -> None:
        held = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(held | changes))

    return apply


def quantize_config(**changes: Any) -> Callable[[Path], None]:
    text = json.dumps(Packing().config | changes)

    def apply(draft: Path) -> None:
        (draft / "quantize_config.json").write_text(text)

    return apply


def parts(
    edit: Callable[[Tensor], Tensor | None], *names: str, first: str = ""
) -> Callable[[Path], None]:
    return lambda draft: change(draft, lambda name, tensor: edit(tensor), *names, first=first)


def poked(value: float) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return edit


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def apply(draft: Path) -> None:
        tensors = load_file(draft / "model.safetensors")
        save_file(
            {name.replace(old, new): tensor for name, tensor in tensors.items()},
            draft / "model.safetensors",
        )

    return apply


def added(source: str, target: str) -> Callable[[Path], None]:
    """Copies of the tensors that hold `source` under another name."""

    def apply(draft: Path) -> None:
        tensors = load_file(draft / "model.safetensors")
        more = {n.replace(source, target): t.clone() for n, t in tensors.items() if source in n}
        assert more
        save_file(tensors | more, draft / "model.safetensors")

    return apply


def truncated(draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_weights(draft: Path) -> None:
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")


def two_checkpoints(draft: Path) -> None:
    (draft / "model.safetensors").rename(draft / "a.safetensors")
    (draft / "b.safetensors").write_bytes((draft / "a.safetensors").read_bytes())


E7 = "layers.2.mlp.experts.7"
REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    # Settings.
    "8 bit": (settings(bits=8), "has bits 8, and only 4 are read here; give a 4-bit, symmetric"),
    "3 bit": (settings(bits=3), "has bits 3, and only 4 are read"),
    "2 bit": (settings(bits=2), "has bits 2, and only 4 are read"),
    "no bits": (settings(bits=None), "has bits None, and only 4 are read"),
    "true bits": (settings(bits=True), "has bits True, and only 4"),
    "awq": (settings(quant_method="awq"), "is quantised by 'awq', which is not read here"),
    "bitsandbytes": (settings(quant_method="bitsandbytes"), "is quantised by 'bitsandbytes'"),
    "method": (settings(quant_method=None, method="gptaq"), "is quantised by 'gptaq'"),
    "marlin": (settings(checkpoint_format="marlin"), "the checkpoint_format 'marlin', which is"),
    "old marlin": (settings(is_marlin_format=True), "the checkpoint_format 'marlin', which is"),
    "bitblas": (settings(checkpoint_format=None, format="bitblas"), "checkpoint_format 'bitblas'"),
    "int64": (settings(pack_dtype="int64"), "has pack_dtype 'int64', and only int32 is read"),
    "rotated": (settings(rotation="hadamard"), r"has rotated weights \(rotation 'hadamard'\)"),
    "no group size": (settings(group_size=None), "has group_size None; it must be -1, for all"),
    "zero group size": (settings(group_size=0), "has group_size 0; it must be -1"),
    "odd group size": (settings(group_size=33), "has group_size 33; it must be -1"),
    "text group size": (settings(group_size="32"), "has group_size '32'; it must be -1"),
    "uneven group size": (settings(group_size=24), "experts have rows of 64, which must be whole"),
    "no desc_act": (settings(desc_act=None), "has desc_act None; it must be true or false"),
    "text sym": (settings(sym="yes"), "has sym 'yes'; it must be true or false"),
    "settings are a list": (config(quantization_config=[4]), "is a JSON list; it must be an obj"),
    "two configs": (
        quantize_config(group_size=64),
        "contradicts itself: quantization_config of config.json says group_size 32 and "
        "quantize_config.json says 64",
    ),
    "two names of a format": (
        settings(format="gptq_v2"),
        "says checkpoint_format 'gptq' and .* says 'gptq_v2'",
    ),
    "broken quantize_config": (
        lambda draft: (draft / "quantize_config.json").write_text("{") and None,
        "quantize_config.json is not valid JSON",
    ),
    # A config that lies.
    "v1 said to be v2": (
        settings(checkpoint_format="gptq_v2"),
        r"gate_proj\.qzeros holds the zero point 7 where symmetric codes have 8; the config "
        r"\(sym true, checkpoint_format gptq_v2\) is not true of it",
    ),
    "asymmetric said to be symmetric": (
        parts(poked(0x76777777), "qzeros", first="experts.0.down_proj"),
        r"experts\.0\.down_proj\.qzeros holds the zero point 7 where .* is not true of it",
    ),
    "asymmetric": (
        lambda draft: (
            settings(sym=False)(draft),
            parts(poked(0x76777777), "qzeros", first="experts.0.down_proj")(draft),
        )[0],
        "holds the zero point 7 where symmetric codes have 8; asymmetric checkpoints are not read",
    ),
    "other group size": (settings(group_size=16), r"qzeros is torch.int32 \[2, 4\]; .* \[4, 4\]"),
    "order without desc_act": (
        parts(lambda g_idx: g_idx.flip(0), "g_idx", first="gate_proj"),
        "g_idx puts inputs out of order, although the config has desc_act false",
    ),
    "desc_act without order": (
        lambda draft: (settings(desc_act=True)(draft), parts(lambda g_idx: None, "g_idx")(draft))[
            0
        ],
        r"lacks model\.layers\.\d+\.mlp\.experts\.0\.gate_proj\.g_idx, which desc_act true calls",
    ),
    # Tensors.
    "truncated": (truncated, "is truncated: tensor"),
    "no safetensors": (no_weights, "holds neither model.safetensors nor model.safetensors.index"),
    "two checkpoints": (two_checkpoints, "holds several checkpoints, a.safetensors, b.safetensors"),
    "no scales": (
        parts(lambda scales: None, "scales", first=E7),
        r"lacks model\.layers\.2\.mlp\.experts\.7\.(gate|up|down)_proj\.scales; download it again",
    ),
    "no qweight": (parts(lambda q: None, "qweight", first=E7), r"lacks model\..*_proj\.qweight;"),
    "empty qweight": (
        parts(lambda q: q[:0], "qweight", first=E7),
        r"qweight is torch.int32 \[0, 32\]",
    ),
    "no qzeros": (parts(lambda q: None, "qzeros", first=E7), r"lacks model\..*_proj\.qzeros;"),
    "no expert": (
        renamed(f"{E7}.", "layers.2.mlp.spare."),
        "does not fit the model: it lacks gate_proj of expert 7 in layer 2; the model has 8",
    ),
    "experts as they were": (
        added(f"{E7}.gate_proj.scales", f"{E7}.gate_proj.weight"),
        "has experts that are not quantised, .*gate_proj.weight among them",
    ),
    "one expert more": (
        added(f"{E7}.", "layers.2.mlp.experts.8."),
        r"it has model\.layers\.2\.mlp\.experts\.8\..*_proj besides 8 experts in each",
    ),
    "one layer more": (added(f"{E7}.", "layers.3.mlp.experts.7."), "it has .*layers.3"),
    "two names": (
        added("model.layers.2.mlp.experts.7.down_proj", "layers.2.mlp.experts.7.down_proj"),
        r"holds both .*layers\.2\.mlp\.experts\.7\.down_proj; leave one",
    ),
    "turned": (
        parts(lambda q: q.t(), "qweight", first=E7),
        r"qweight is torch.int32 \[.*\]; the model's sizes, bits 4 and group_size 32 make it "
        r"torch.int32 \[8, 32\]",
    ),
    "codes in bytes": (parts(lambda q: q.to(torch.uint8), "qweight"), "qweight is torch.uint8"),
    "whole scales": (
        parts(lambda s: s.to(torch.int32), "scales"),
        "scales is torch.int32 .* make it torch.float16 or torch.bfloat16 or torch.float32",
    ),
    "NaN in the first expert": (
        parts(poked(float("nan")), "scales", first="experts.0.up_proj"),
        r"experts\.0\.up_proj\.scales holds an infinity or a NaN; download or quantise it again",
    ),
    "infinity in the last expert": (
        parts(poked(float("inf")), "scales", first=E7),
        r"experts\.7\..*scales holds an infinity",
    ),
    "fine scales": (
        parts(lambda s: s.float() * 1.0001, "scales"),
        "in torch.float32, which float16, .* cannot",
    ),
    "uneven groups": (
        parts(poked(0), "g_idx", first="experts.7.gate_proj"),
        r"experts\.7\.gate_proj\.g_idx must name each of 2 groups for 32 of the 64 inputs",
    ),
    "biases": (
        lambda draft: add_biases(draft, 0.5),
        r"_proj\.bias is not zero, and the model's experts have no bias",
    ),
    # Another model.
    "fewer layers": (
        config(num_hidden_layers=2),
        "does not fit the model: its config.json has num_hidden_layers 2 and the model's has 3",
    ),
    "another family": (config(model_type="olmoe"), "has model_type 'olmoe' and the model's has"),
    "more experts": (config(num_local_experts=16), "has num_.*experts 16 and the model's has 8"),
    "wider": (config(hidden_size=128), "has hidden_size 128 and the model's has 64"),
    "another router": (
        parts(poked(9.0), "mlp.gate.weight", first="layers.2"),
        r"was made from another model: its model\.layers\.2\.mlp\.gate\.weight, which is not quant",
    ),
    "other experts": (
        parts(lambda q: ~q, "qweight", first="layers.0.mlp.experts.0.down_proj"),
        "was made from another model, or has gate and up in another order: its first expert",
    ),
    "nothing to tell by": (
        parts(lambda w: None, "mlp.gate.weight", "embed_tokens.weight"),
        "has no router and no embedding in common with the model",
    ),
}


@pytest.fixture(scope="module")
def good(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tmp_path_factory.mktemp("good") / "draft"
    write_gptq(draft, tiny("qwen3_moe"), Packing())
    return draft


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, good: Path, tiny: Folder, tmp_path: Path) -> None:
    damage, sentence = REFUSALS[name]
    draft = gptq_files.copy_folder(good, tmp_path / "draft")
    damage(draft)
    with pytest.raises(SpeqError, match=sentence) as refused:
        generated(tiny("qwen3_moe"), str(draft))
    assert str(draft) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_folder_that_is_damaged_above_is_a_good_one(good: Path, tiny: Folder) -> None:
    tokens, _ = generated(tiny("qwen3_moe"), str(good))
    assert tokens == greedy_tokens(load_plain(tiny("qwen3_moe")), PROMPT_IDS, 24)


@pytest.mark.parametrize("damage", ["8 bit", "no scales", "another router", "truncated"])
def test_refused_before_weights_are_loaded_and_without_room(
    damage: str, good: Path, tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = gptq_files.copy_folder(good, tmp_path / "draft")
    REFUSALS[damage][0](draft)
    monkeypatch.setattr("speq.models.moe_model.load", None)
    for budget in (BUDGET, "600KiB"):
        config = RunConfig.of(budget, draft=draft)
        with pytest.raises(SpeqError, match=REFUSALS[damage][1]):
            Runtime(loading.load(open_model(tiny("qwen3_moe")), config))


def test_up_before_gate(small: Path, tmp_path: Path) -> None:
    """Nobody is known to fuse them so, and nothing else would tell."""
    draft = tmp_path / "draft"
    write_gptq(draft, small, Packing(names="fused"))
    change(draft, lambda name, t: t.roll(t.shape[1] // 2, 1), "qweight", "scales", first="gate_up")
    with pytest.raises(SpeqError, match="or has gate and up in another order"):
        generated(small, str(draft))


def test_gate_and_up_in_different_orders(small: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    write_gptq(draft, small, Packing(desc_act=True))
    change(draft, lambda name, g_idx: g_idx.flip(0), "up_proj.g_idx", first="experts.1.")
    with pytest.raises(SpeqError, match=r"gate_proj and .*\.experts\.1\.up_proj have different g"):
        load(draft, SMALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_draft_kept_in_another_dtype(dtype: torch.dtype, tiny: Folder, tmp_path: Path) -> None:
    """Routers that were rounded to another dtype are still the model's."""
    draft = tmp_path / "draft"
    write_gptq(draft, tiny("mixtral"), Packing(group_size=16, names="old"))
    renamed(".mlp.gate.", ".block_sparse_moe.gate.")(draft)
    change(draft, lambda name, tensor: tensor.to(dtype), ".weight")
    tokens, _ = generated(tiny("mixtral"), str(draft))
    assert tokens == greedy_tokens(load_plain(tiny("mixtral")), PROMPT_IDS, 24)
    change(draft, lambda name, tensor: tensor.float() * 1.05, "gate.weight", first="layers.1")
    with pytest.raises(SpeqError, match=r"its model\.layers\.1\.block_sparse_moe\.gate\.weight"):
        generated(tiny("mixtral"), str(draft))


def test_embeddings_tell_where_routers_are_quantised_too(tiny: Folder, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    write_gptq(draft, tiny("olmoe"), Packing())
    parts(lambda weight: None, "mlp.gate.weight")(draft)
    assert generated(tiny("olmoe"), str(draft))[0]
    parts(poked(3.0), "embed_tokens.weight")(draft)
    with pytest.raises(SpeqError, match=r"its model\.embed_tokens\.weight, which is not quantised"):
        generated(tiny("olmoe"), str(draft))


def test_routers_of_every_family_are_found(tiny: Folder, tmp_path: Path) -> None:
    for family in FAMILIES:
        draft = tmp_path / family
        write_gptq(draft, tiny(family), Packing(group_size=16))
        parts(lambda weight: None, "embed_tokens.weight")(draft)
        opened = open_model(tiny(family))
        folder = draft_source.open_gptq(
            draft, opened.checkpoint, opened.store, opened.shape.experts, dense=()
        )
        assert isinstance(opened.checkpoint, Checkpoint)
        folder.close()
        opened.close()
