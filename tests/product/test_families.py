"""What a family's entry says: names on disk, what transformers has of it, and what is loaded."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version
from transformers.models.qwen2_moe import modeling_qwen2_moe

from speq import Generator, SpeqError
from speq.devices.device import Processor
from speq.experts.expert_names import USUAL_NAMES, ExpertMatrix
from speq.experts.expert_store import expert_slot, read_matrices
from speq.files.text_part import TextModelPart
from speq.layers.gates import deepseek_v3_gate, normalized_gate
from speq.layers.offloaded_experts import OffloadedExperts
from speq.models import moe_model
from speq.models.attention import BESIDE_SINKS, cached_latents
from speq.models.families import (
    FAMILIES,
    GRANITE_NAMES,
    GRANITE_RENAMED,
    HUNYUAN_NAMES,
    MIXTRAL_NAMES,
    PHIMOE_NAMES,
    family_of,
)
from speq.models.family import Family
from speq.models.family_checks import check_pairs
from speq.models.kv_cache import KVCache
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from speq.models.resident import mapped_regions
from speq.routing import Route
from speq.version import is_before
from tests.helpers.tiny_models import FAMILIES as INSTALLED
from tests.helpers.tiny_models import (
    FAMILY_OPTIONS,
    config_of,
    greedy_tokens,
    load_plain,
    write_fused,
    write_model,
)

BIASED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "dots1", "solar_open")


GRANITE: dict[str, Any] = {
    "names": GRANITE_NAMES,
    "gate": normalized_gate,
    "num_experts": "num_local_experts",
    "expert_width": "intermediate_size",
    "scaled_by": "residual_multiplier",
}
# Entries of families that speq does not list, with what small models of them are like.
NEW: dict[str, tuple[Family, dict[str, Any]]] = {
    "axk1": (
        Family(
            "axk1",
            "AXK1Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            normed=True,
        ),
        FAMILY_OPTIONS["deepseek_v3"],
    ),
    "granitemoeshared": (
        Family(
            "granitemoeshared",
            "GraniteMoeSharedExperts",
            text_part=TextModelPart("granitemoeshared", renamed=GRANITE_RENAMED),
            **GRANITE,
        ),
        FAMILY_OPTIONS["granitemoe"] | {"shared_intermediate_size": 48},
    ),
    "granitemoe_swa": (
        Family(
            "granitemoe_swa",
            "GraniteMoeSWAExperts",
            typed_masks=True,
            attention_by=BESIDE_SINKS,
            text_part=TextModelPart("granitemoe_swa", renamed=GRANITE_RENAMED),
            **GRANITE,
        ),
        FAMILY_OPTIONS["granitemoe"]
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 16},
    ),
}


@pytest.mark.parametrize("name", NEW)
def test_a_family_of_the_common_form_is_an_entry_and_a_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is needed for tokens of a prompt, with drafts and without, in few slots."""
    if name not in CONFIG_MAPPING or is_before(transformers_version, "5.23"):
        pytest.skip("transformers lacks the family")
    entry, options = NEW[name]
    monkeypatch.setitem(FAMILIES, name, entry)
    monkeypatch.setitem(FAMILY_OPTIONS, name, options)
    model = write_model(tmp_path / "m", name)
    expected = greedy_tokens(load_plain(model), [*range(40)], 30)
    for draft_length in (0, 3):
        generator = Generator.from_pretrained(
            model, "1MiB", dtype="float32", draft_length=draft_length
        )
        made = generator.generate([*range(40)], max_new_tokens=30, ignore_eos=True)
        assert made.token_ids == expected
        assert made.stats["draft_length_mean"] > 0 or draft_length == 0
        generator.close()


def test_two_threads_leave_the_familys_own_experts() -> None:
    """The second waits: otherwise it would take the first one's stand-in for the original."""
    original = modeling_qwen2_moe.Qwen2MoeExperts
    family = FAMILIES["qwen2_moe"]
    inside, leave = threading.Event(), threading.Event()
    entered: list[str] = []

    def first() -> None:
        with family.without_experts():
            entered.append("first")
            inside.set()
            leave.wait(10)

    def second() -> None:
        with family.without_experts():
            entered.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    assert modeling_qwen2_moe.Qwen2MoeExperts is OffloadedExperts
    threads[1].start()
    assert entered == ["first"]
    leave.set()
    for thread in threads:
        thread.join(10)
    assert entered == ["first", "second"]
    assert modeling_qwen2_moe.Qwen2MoeExperts is original
    assert issubclass(original, torch.nn.Module)


@pytest.mark.parametrize(
    ("names", "name", "matrix"),
    [
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.up_proj.weight", (3, 12, "up_proj")),
        (USUAL_NAMES, "layers.0.mlp.experts.0.down_proj.weight", (0, 0, "down_proj")),
        (USUAL_NAMES, "model.layers.3.block_sparse_moe.experts.12.w3.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.w3.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.shared_experts.up_proj.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.up_proj.weight_packed", (3, 12, "up_proj")),
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.up_proj.weight_mean", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.up_proj.weight", None),
        (MIXTRAL_NAMES, "model.layers.3.block_sparse_moe.experts.1.w1.weight", (3, 1, "gate_proj")),
        (MIXTRAL_NAMES, "model.layers.3.block_sparse_moe.experts.1.w2.weight", (3, 1, "down_proj")),
        (MIXTRAL_NAMES, "model.layers.3.mlp.experts.1.up_proj.weight", (3, 1, "up_proj")),
        (USUAL_NAMES, "model.layers.3.mlp.experts.gate_up_proj", (3, None, "gate_up_proj")),
        (USUAL_NAMES, "model.layers.3.mlp.experts.down_proj", (3, None, "down_proj")),
        (MIXTRAL_NAMES, "model.layers.3.mlp.experts.down_proj", (3, None, "down_proj")),
        (USUAL_NAMES, "model.layers.3.mlp.experts.up_proj", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.gate_up_proj_bias", None),
    ],
)  # fmt: skip
def test_experts_by_their_names(names: object, name: str, matrix: object) -> None:
    assert isinstance(names, type(USUAL_NAMES))
    assert names.matrix(name) == (None if matrix is None else ExpertMatrix(*matrix))  # type: ignore[misc]
    assert names.is_expert(name) == (matrix is not None)


def test_routers_by_their_names() -> None:
    router = "model.layers.7.block_sparse_moe.gate.weight"
    assert USUAL_NAMES.router.search(router) is None
    for names in (MIXTRAL_NAMES, PHIMOE_NAMES):
        found = names.router.search(router)
        assert found is not None
        assert found[1] == "7"
    assert PHIMOE_NAMES.router.search("model.layers.7.mlp.router.weight")
    assert HUNYUAN_NAMES.router.search("model.layers.7.mlp.gate.wg.weight")
    assert not MIXTRAL_NAMES.router.search("model.layers.7.mlp.router.weight")


def test_a_family_that_transformers_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "later_moe", Family("later_moe", "LaterExperts", since="9.3"))
    sentence = (
        f"/a is of family 'later_moe', which transformers {transformers_version} lacks; install "
        "transformers 9.3 or later"
    )
    with pytest.raises(SpeqError) as refused:
        family_of({"model_type": "later_moe"}, "/a")
    assert str(refused.value) == sentence


def test_an_older_form_of_a_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("mixtral", "MixtralExperts", since="99.1")
    monkeypatch.setitem(FAMILIES, "mixtral", family)
    with pytest.raises(
        SpeqError, match=r"has in an older form; install transformers 99\.1 or later"
    ):
        family_of({"model_type": "mixtral"}, "/a")


@pytest.mark.skipif("mistral4" not in INSTALLED, reason="transformers has it in an older form")
def test_a_family_within_a_configuration_of_another_type() -> None:
    """Mistral 4 is published as the text of a model of pictures, whose text may be dense too."""
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}
    assert family_of(config, "/a").model_type == "mistral4"
    for text in ({"model_type": "mistral"}, {}, None):
        with pytest.raises(SpeqError, match=r"/a is of family .*mistral.*not supported"):
            family_of({"model_type": "mistral3", "text_config": text}, "/a")


@pytest.mark.skipif("mistral4" not in INSTALLED, reason="transformers has it in an older form")
@pytest.mark.parametrize("name", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_what_queries_grow_by_is_wanted(name: str) -> None:
    """transformers' own layers would fail in a pass without it."""
    config = config_of("mistral4").text_config
    FAMILIES["mistral4"].check(config, 8, "/a")
    config.rope_parameters = {**config.rope_parameters, name: None}
    with pytest.raises(SpeqError, match=f"/a has {name} None in rope_parameters; it must be a num"):
        FAMILIES["mistral4"].check(config, 8, "/a")


@pytest.mark.parametrize(
    ("version", "other", "before"),
    [
        ("5.17.0", "5.23", True),
        ("5.23.0", "5.23", False),
        ("5.23.0.dev0", "5.23", False),
        ("5.9.1", "5.23", True),
        ("6.0.0", "5.23", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, other: str, before: bool) -> None:
    assert is_before(version, other) == before


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_routers_correction_is_loaded_in_float32(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Path]
) -> None:
    """Into memory of its own, as all that is resident, and counted as such."""
    opened = open_model(tiny(family))
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    stored = load_file(tiny(family) / "model.safetensors")
    for layer in opened.shape.experts.layers:
        bias = model.body.layers[layer].mlp.gate.e_score_correction_bias  # type: ignore[index, union-attr]
        assert isinstance(bias, torch.Tensor)
        assert bias.dtype == torch.float32
        assert bias.abs().max() > 0.05
        assert torch.equal(bias, stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
        file = str(tiny(family) / "model.safetensors")
        mapped = [region for region in mapped_regions() if region.path == file]
        assert not any(region.start <= bias.data_ptr() < region.end for region in mapped)
    assert model.nbytes == opened.shape.resident_bytes(dtype)
    opened.close()


@pytest.mark.parametrize(
    ("family", "ending"),
    [("ernie4_5_moe", "mlp.gate.weight"), ("hunyuan_v1_moe", "gate.wg.weight")],
)
def test_routers_that_transformers_keeps_in_float32(
    family: str, ending: str, tiny_bfloat16: Callable[[str], Path]
) -> None:
    """They are published so, stay so, are counted so, and are none of the dense layers."""
    path = tiny_bfloat16(family)
    opened = open_model(path)
    model = moe_model.load(opened.family, opened.checkpoint, torch.bfloat16, Processor())
    stored = load_file(path / "model.safetensors")
    weights = {name: w for name, w in model.body.named_parameters() if name.endswith(ending)}
    assert len(weights) == len(opened.shape.experts.layers)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stored[f"model.{name}"])
        assert f"model.{name}" not in opened.shape.dense_names
    assert model.nbytes == opened.shape.resident_bytes(torch.bfloat16)
    opened.close()


@pytest.mark.parametrize(
    "family",
    [each for each in ("afmoe", "deepseek_v32", "glm_moe_dsa", "gpt_oss") if each in INSTALLED],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_that_transformers_keeps_in_float32_under_float16_alone(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Path]
) -> None:
    opened = open_model(tiny(family))
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    assert model.nbytes == opened.shape.resident_bytes(dtype)
    opened.close()


@pytest.mark.parametrize("family", ["minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe", "qwen2_moe"])
def test_what_the_next_router_would_say(family: str, tiny: Callable[[str], Path]) -> None:
    """Whatever it is given beside hidden states: its logits are a product with its weight."""
    opened = open_model(tiny(family))
    model = moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    stored = load_file(tiny(family) / "model.safetensors")
    weights = [stored[name] for name in sorted(stored) if opened.family.names.router.search(name)]
    heard = Foreseen()
    cache = KVCache(3, opened.shape.attention.kv_shapes, 8, torch.float32, torch.device("cpu"))
    model.forward(heard, [SequenceTokens(cache, [5, 6, 7])])
    opened.close()
    assert len(heard.inputs) == len(weights) == model.num_moe_layers
    assert heard.said[-1] is None
    for inputs, said, weight in zip(heard.inputs[:-1], heard.said[:-1], weights[1:], strict=True):
        assert said is not None
        torch.testing.assert_close(said, torch.nn.functional.linear(inputs[[0, 2]], weight))


class Foreseen:
    """A bank without experts, which asks for the routes of the layers behind."""

    drafts = False

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.said: list[torch.Tensor | None] = []

    def __call__(self, layer: int, hidden_states: torch.Tensor, route: Route) -> torch.Tensor:
        self.inputs.append(hidden_states)
        self.said.append(None if route.next_router is None else route.next_router([0, 2]))
        return torch.zeros_like(hidden_states)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "minimax_m2"])
def test_experts_of_a_layer_in_one_tensor(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """One range of the file for each expert and tensor; the same records as of experts alone."""
    path = write_fused(tmp_path / "fused", tiny(family))
    alone, fused = open_model(tiny(family)), open_model(path)
    stores = alone.store, fused.store
    assert [(store.num_layers, store.num_experts) for store in stores] == [
        (stores[0].num_layers, stores[0].num_experts)
    ] * 2
    for layer in range(stores[0].num_layers):
        for expert in range(stores[0].num_experts):
            ours, theirs = (read_matrices(s, layer, expert, expert_slot(s)) for s in stores)
            assert all(map(torch.equal, ours, theirs))
    alone.close()
    fused.close()
    plain = greedy_tokens(load_plain(path), [5, 6, 7], 24)
    generator = Generator.from_pretrained(path, "16MiB", dtype="float32", draft_length=3)
    result = generator.generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert result.token_ids == plain
    assert result.stats["draft_length_mean"] > 0


def test_experts_in_one_tensor_that_do_not_fit(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Transposed, one too few, and beside the same experts alone."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    path = write_fused(tmp_path / "fused", tiny("qwen2_moe"))
    sound = load_file(path / "model.safetensors")
    alone = load_file(tiny("qwen2_moe") / "model.safetensors")
    for tensors, message in (
        (sound | {name: sound[name].transpose(1, 2).contiguous()}, r"make it .*\[8, 96, 64\]"),
        (sound | {name: sound[name][:7].contiguous()}, r"\[7, 96, 64\].* make it"),
        (sound | alone, "has experts of layer 0 twice, alone and in one tensor of all"),
        ({n: t for n, t in sound.items() if n != name}, "lacks gate_proj of expert 0 in layer 0"),
    ):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SpeqError, match=message):
            open_model(path)


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GLM-4.5-Air has one behind its 46 layers, with experts; transformers does not run it."""
    model = write_model(tmp_path / "model", "glm4_moe")
    plain = greedy_tokens(load_plain(model), [5, 6, 7], 24)
    tensors = load_file(model / "model.safetensors")
    of_last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    for name, tensor in of_last.items():
        tensors[name.replace(".layers.2.", ".layers.46.")] = tensor.clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    opened = open_model(model)
    assert (opened.store.num_layers, opened.store.num_experts) == (2, 8)
    opened.close()
    with caplog.at_level(logging.WARNING, "speq"):
        generator = Generator.from_pretrained(model, "16MiB", dtype="float32", draft_length=3)
    result = generator.generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert result.token_ids == plain
    assert "has no use for" not in caplog.text
