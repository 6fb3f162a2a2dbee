"""A checkpoint's own layer that predicts tokens ahead: what is read, computed and refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.heads.head_context import HeadContext
from speq.heads.mtp_file import mtp_of, read_slots
from speq.heads.mtp_head import MtpHead
from speq.measure.plan import plan as plan_of
from speq.models.families import FAMILIES
from speq.models.opened import open_model
from tests.helpers.fp8_files import write_fp8
from tests.helpers.head_walk import assert_pieces_make_the_whole
from tests.helpers.mtp_files import FILE, PlainMtp, mtp_in_numpy, own_tensors, write_mtp
from tests.helpers.paths import DATA
from tests.helpers.picture_files import stored_tensors
from tests.helpers.tiny_models import (
    VOCAB,
    drawn_tokens,
    experts_alone,
    greedy_tokens,
    load_plain,
    write_model,
)

HIDDEN = 64
Folder = Callable[[str], Path]
# What a layer makes of the embeddings of tokens and of the features before them, and its scores.
Layer = Callable[[list[int], Tensor], tuple[Tensor, Tensor]]
# One without experts, one apart from the model's layers, one behind them; the others are alike.
OTHERS = (
    "ernie4_5_moe",
    "qwen3_next",
    "deepseek_v3",
    pytest.param("qwen3_5_moe", marks=pytest.mark.wide),
    pytest.param("glm4_moe_lite", marks=pytest.mark.wide),
    pytest.param("hy_v3", marks=pytest.mark.wide),
    "mellum",
)


@pytest.fixture
def model(tiny: Folder, tmp_path: Path) -> Path:
    return write_mtp(tmp_path / "model", tiny("glm4_moe"), seed=1)


class Ends:
    """As much of a model as a head asks for: its embedding and its head."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Path) -> None:
        tensors = stored_tensors(model)
        # In the dtype that is computed in, as a model holds them.
        ends = (tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
        self.table, self.head = (each.to(self.dtype) for each in ends)

    def tokens(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids)

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.table[token_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.head.T


def in_numpy(model: Path) -> Layer:
    """The layer of a glm4_moe checkpoint, one entry at a time."""
    config = AutoConfig.from_pretrained(model)
    prefix = f"model.layers.{config.num_hidden_layers}."
    table = load_file(model / FILE)[prefix + "embed_tokens.weight"].double()

    def layer(token_ids: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        found = mtp_in_numpy(model, config, table[token_ids], features)
        return torch.from_numpy(found["feature"]), torch.from_numpy(found["scores"])

    return layer


class Whole:
    """A text at once."""

    def __init__(self, layer: Layer, features: Tensor) -> None:
        self.layer, self.features = layer, features

    def at(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """What the layer makes of the last token, and its scores of all tokens."""
        rows = self.features.double()
        while True:
            made, scores = self.layer(token_ids[1 : len(rows) + 1], rows)
            if len(rows) == len(token_ids) - 1:
                return made[-1], scores[-1]
            rows = torch.cat([rows, made[-1:]])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=2e-5)


def walk(path: Path, layer: Layer, owned: tuple[str, ...] = ()) -> None:
    """Prompts in chunks, then rounds: a chain, a tree, what was accepted."""
    opened = open_model(path)
    source = mtp_of(opened)
    assert source.owned == owned
    head = source.load(torch.float32, torch.device("cpu"))
    opened.close()
    assert_pieces_make_the_whole(
        HeadContext(Ends(path), head, 200),  # type: ignore[arg-type]
        torch.randn(40, HIDDEN),
        lambda features: Whole(layer, features),
        VOCAB,
        chunks=(1, 6, 9),
        rounds=(2, 0),
        nodes=3,
        atol=2e-5,
    )


@pytest.mark.parametrize("own", [(), ("embed_tokens", "shared_head.head")])
def test_pieces_make_the_whole(own: tuple[str, ...], tiny: Folder, tmp_path: Path) -> None:
    path = write_mtp(tmp_path / "model", tiny("glm4_moe"), seed=2, own=own)
    walk(path, in_numpy(path), tuple(f"model.layers.3.{name}.weight" for name in own))


@pytest.mark.parametrize("family", OTHERS)
def test_pieces_of_other_families(family: str, tiny: Folder, tmp_path: Path) -> None:
    path = write_mtp(tmp_path / "model", tiny(family), seed=3)
    walk(path, PlainMtp(path))


ROPE = {"rope_type": "default", "rope_theta": 500000.0}


def mellum(path: Path, kinds: list[str], **settings: Any) -> Path:
    """One whose first layer, which the MTP layer is like, is dense."""
    model = write_model(
        path / "plain",
        "mellum",
        layer_types=kinds,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={kind: ROPE for kind in kinds},
        **settings,
    )
    return write_mtp(path / "model", model, seed=3)


def test_a_config_says_the_kinds_of_its_mtp_layer(tmp_path: Path) -> None:
    full = ["full_attention"]
    path = mellum(tmp_path, full * 3, mtp_layer_types=full, mtp_mlp_layer_types=["dense"])
    walk(path, PlainMtp(path))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "rope_parameters of .* lack 'sliding_attention'"),
        ({"mtp_layer_types": ["linear_attention"]}, "kind 'linear_attention' in mtp_layer_types"),
        ({"mtp_mlp_layer_types": ["moe"]}, "kind 'moe' in mtp_mlp_layer_types"),
    ],
)
def test_other_kinds_of_mtp_layers_are_refused(
    given: dict[str, list[str]], wanted: str, tmp_path: Path
) -> None:
    opened = open_model(mellum(tmp_path, ["full_attention"] * 3, **given))
    with pytest.raises(SpeqError, match=wanted):
        mtp_of(opened)
    opened.close()


def test_two_references_agree(model: Path) -> None:
    """That of glm4_moe in numpy, and that of all families."""
    features, tokens = torch.randn(6, HIDDEN).double(), [*range(20, 26)]
    for found, wanted in zip(
        PlainMtp(model)(tokens, features), in_numpy(model)(tokens, features), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_pieces_in_fp8(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """Experts run out of codes; all else that is published in codes is words in memory."""
    source = write_mtp(tmp_path / "source", tiny_bfloat16("deepseek_v3"), seed=4)
    path = write_fp8(tmp_path / "model", tmp_path / "words", source)
    kinds = {name: tensor.dtype for name, tensor in load_file(path / FILE).items()}
    prefix = "model.layers.3."
    assert kinds[f"{prefix}eh_proj.weight"] == torch.bfloat16
    for name in ("self_attn.q_a_proj", "mlp.experts.7.down_proj", "mlp.shared_experts.up_proj"):
        assert kinds[f"{prefix}{name}.weight"] == torch.float8_e4m3fn
    walk(path, PlainMtp(tmp_path / "words"))


def test_experts_lie_alone_or_in_one_tensor(tiny: Folder, tmp_path: Path) -> None:
    """Those of qwen3_5_moe are published both ways."""
    fused = write_mtp(tmp_path / "fused", tiny("qwen3_5_moe"), seed=5)
    alone = write_mtp(tmp_path / "alone", tiny("qwen3_5_moe"), seed=5)
    tensors = load_file(alone / FILE)
    of_layer = {name: each for name, each in tensors.items() if name.startswith("mtp.")}
    others = {name: each for name, each in tensors.items() if name not in of_layer}
    save_file(others | experts_alone(of_layer), alone / FILE, metadata={"format": "pt"})
    assert "mtp.layers.0.mlp.experts.7.up_proj.weight" in load_file(alone / FILE)
    slots = []
    for path in (fused, alone):
        opened = open_model(path)
        store = mtp_of(opened).store
        assert store is not None
        slots.append(read_slots(store, torch.device("cpu")))
        opened.close()
    assert torch.equal(*slots)


def test_packs_keep_layers_that_lie_apart(tiny: Folder, tmp_path: Path) -> None:
    """And leave out the experts of those behind the model's last."""
    slots = []
    for family in ("qwen3_next", "glm4_moe"):
        opened = open_model(write_mtp(tmp_path / family, tiny(family)))
        assert isinstance(opened.store, SafetensorsExpertStore)
        pack(opened.checkpoint, opened.store, tmp_path / f"{family}-packed")
        packed = open_model(tmp_path / f"{family}-packed")
        if family == "glm4_moe":
            with pytest.raises(SpeqError, match=r"holds no experts of model\.layers\.3"):
                mtp_of(packed)
        else:
            stores = [mtp_of(each).store for each in (opened, packed)]
            slots = [read_slots(each, torch.device("cpu")) for each in stores if each is not None]
        packed.close()
        opened.close()
    assert torch.equal(*slots)


def test_experts_may_be_of_other_words_than_the_models(model: Path) -> None:
    tensors = load_file(model / FILE)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.3.mlp.experts."):
            tensors[name] = tensor.double()  # which come first in the file
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    opened = open_model(model)
    store = mtp_of(opened).store
    assert store is not None
    assert store.codec.shape.dtype == torch.float64
    assert opened.store.codec.shape.dtype == torch.float32
    opened.close()


def test_many_rows_are_read_at_once(model: Path) -> None:
    """A prompt, whose rows see one another by a mask."""
    opened = open_model(model)
    head = mtp_of(opened).load(torch.float32, torch.device("cpu"))
    opened.close()
    features, tokens = torch.randn(120, HIDDEN), [(7 * at) % VOCAB for at in range(120)]
    text = HeadContext(Ends(model), head, 200)  # type: ignore[arg-type]
    text.observe_verified(tokens, features)
    close(text.root(3).feature, Whole(in_numpy(model), features).at([*tokens, 3])[0])


@pytest.mark.parametrize(
    ("family", "nodes"),
    [
        ("glm4_moe", None),
        ("glm4_moe", 8),
        pytest.param("qwen3_next", 8, marks=pytest.mark.wide),
        pytest.param("deepseek_v3", None, marks=pytest.mark.wide),
        pytest.param("ernie4_5_moe", 8, marks=pytest.mark.wide),
        pytest.param("qwen3_5_moe", None, marks=pytest.mark.full),
        pytest.param("glm4_moe_lite", 8, marks=pytest.mark.full),
        pytest.param("hy_v3", 8, marks=pytest.mark.wide),
        pytest.param("mellum", 8, marks=pytest.mark.wide),
    ],
)
def test_tokens_are_the_exact_models(
    family: str,
    nodes: int | None,
    tiny: Folder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Chains and trees, greedy and drawn, of a layer that knows nothing."""
    path = write_mtp(tmp_path / "model", tiny(family), seed=1)
    plain = load_plain(path)
    prompt = [*range(40, 60)]
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    with caplog.at_level(logging.WARNING, logger="speq"):
        generator = Generator.from_pretrained(
            path,
            "8MiB",
            drafter="head",
            head="mtp",
            dtype="float32",
            draft_length=3,
            draft_nodes=nodes,
        )
    assert "no use for" not in caplog.text
    result = generator.generate(prompt, max_new_tokens=30, ignore_eos=True)
    assert result.token_ids == greedy_tokens(plain, prompt, 30)
    assert result.stats["draft_length_mean"] > 0
    made = generator.generate(prompt, max_new_tokens=30, ignore_eos=True, **options)
    assert made.token_ids == drawn_tokens(plain, prompt, 30, SamplingParams(**options))
    generator.close()


@pytest.mark.parametrize("family", ["glm4_moe", *OTHERS])
def test_the_layer_takes_its_share_of_the_budget(family: str, tiny: Folder, tmp_path: Path) -> None:
    path = write_mtp(tmp_path / "model", tiny(family), seed=1)
    options: dict[str, Any] = {"dtype": "float32", "context_length": 64}
    drafting = {"drafter": "head", "head": "mtp", "draft_length": 2}
    generator = Generator.from_pretrained(path, "8MiB", **options, **drafting)
    plan, head = generator.runtime.plan, generator.runtime._loaded.head
    assert isinstance(head, MtpHead)
    mine = own_tensors(path)
    assert not any(FAMILIES[family].holds(name, 3) for name in mine)  # they are not the model's
    dense_bytes = sum(each.nbytes for name, each in mine.items() if ".experts." not in name)
    if family == "ernie4_5_moe":  # the model's last norm, once more, and no experts
        dense_bytes += HIDDEN * 4
        slots_bytes = 0
    else:
        slots_bytes = 8 * 3 * HIDDEN * 32 * 4
    assert plan.items["head"] == head.nbytes == dense_bytes + slots_bytes
    held = sum(each.nbytes for each in [*head.layer.parameters(), *head.layer.buffers()])
    rotary = sum(each.nbytes for each in head.layer.rotary.buffers())
    assert held - rotary == dense_bytes
    before = plan_of(path, "8MiB", head="mtp", preset="laptop-ddr5", device="cpu", **options)
    assert before.with_head is not None
    for name in ("head", "kv_cache"):
        assert before.with_head.items[name] == plan.items[name]
    slot_bytes = generator.runtime._loaded.opened.store.codec.slot_bytes
    smallest = sum(plan.items.values()) - (plan.slots - 2) * slot_bytes
    generator.close()
    with pytest.raises(SpeqError, match="smallest workable budget") as error:
        Generator.from_pretrained(path, smallest - 8 * slot_bytes, **options, **drafting)
    assert "\n" not in str(error.value)


def test_what_is_no_layer_is_refused(model: Path, tiny: Folder, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(SpeqError) as error:
            Generator.from_pretrained(path, "8MiB", drafter="head", head="mtp", dtype="float32")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no tensor model.layers.3.eh_proj.weight" in refused(tiny("glm4_moe"))
    sentence = refused(tiny("olmoe"))
    known = (
        "deepseek_v3",
        "ernie4_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "hy_v3",
        "mellum",
        "qwen3_5_moe",
    )
    assert "family olmoe" in sentence
    assert f"it reads those of {', '.join(known)}, qwen3_next" in sentence

    def changed(path: Path, **tensors: Tensor | None) -> Path:
        kept = {n: t for n, t in (load_file(path / FILE) | tensors).items() if t is not None}
        save_file(kept, path / FILE, metadata={"format": "pt"})
        return path

    name = "model.layers.3.hnorm.weight"
    whole = load_file(model / FILE)
    assert f"lacks tensor {name}" in refused(changed(model, **{name: None}))
    assert f"{name} has shape [63]" in refused(changed(model, **{name: torch.ones(63)}))
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    changed(model, **whole)
    assert "lacks up_proj of expert 5 in layer 3" in refused(changed(model, **{name: None}))
    without = {name: None for name in whole if "layers.3.mlp.experts." in name}
    assert "holds no experts of model.layers.3" in refused(changed(model, **without))
    config = json.loads((model / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


def test_layers_apart_are_refused_by_name(tiny: Folder, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        opened = open_model(path)
        with pytest.raises(SpeqError) as error:
            mtp_of(opened)
        opened.close()
        assert "\n" not in str(error.value)
        return str(error.value)

    def without(path: Path, begin: str) -> Path:
        kept = {n: t for n, t in load_file(path / FILE).items() if not n.startswith(begin)}
        save_file(kept, path / FILE, metadata={"format": "pt"})
        return path

    assert "no tensor model.mtp_linear_proj.0.weight" in refused(tiny("ernie4_5_moe"))
    path = write_mtp(tmp_path / "ernie", tiny("ernie4_5_moe"))
    name = "model.mtp_linear_proj.0.weight"  # as ERNIE-4.5-300B-A47B was published
    tensors = load_file(path / FILE)
    save_file(tensors | {name: tensors[name].T.contiguous()}, path / FILE)
    assert f"{name} has shape [128, 64]" in refused(path)
    path = without(write_mtp(tmp_path / "qwen", tiny("qwen3_next")), "mtp.layers.0.mlp.experts.")
    assert "holds no experts of mtp.layers.0" in refused(path)
    assert "lacks tensor mtp.norm.weight" in refused(without(path, "mtp.norm"))
    assert "no tensor mtp.fc.weight" in refused(without(path, "mtp."))
    # Its config.json may promise some, and nobody has published them.
    assert "family minimax_m2" in refused(tiny("minimax_m2"))


def test_a_plan_needs_weights_to_know_a_layer() -> None:
    path = DATA / "published" / "Qwen3-Next-80B-A3B-Instruct"
    with pytest.raises(SpeqError, match=r"head is mtp and .* holds no weights"):
        plan_of(path, "64GiB", head="mtp", preset="laptop-ddr5")
