"""Drafts whose dense layers run on codes: the codes, where they come from, and what they cost."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator, SpeqError
from speq.drafts import draft_file
from speq.drafts.dense_draft import DenseCodes, DenseDraft, DenseLayout
from speq.drafts.draft_source import dense_draft, open_draft
from speq.experts.int4 import round_into
from speq.kernels import ops
from speq.kernels.ops import Int4Weight
from speq.layers.int4_matrix import Int4Matrix
from speq.models.opened import open_model
from speq.planning.candidates import candidates_of
from speq.planning.demand import Budget, demand_of
from speq.planning.model_spec import ModelSpec
from tests.helpers.gptq_files import copy_folder
from tests.helpers.picture_files import stored_tensors
from tests.helpers.quantising import SETTINGS, quantise_to
from tests.helpers.tiny_models import BY_FAMILY
from tests.reference import int4

Folder = Callable[[str], Path]
GROUP = 32


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def unpacked(qweight: Tensor, scales: Tensor) -> np.ndarray:
    """Numbers that INT4 codes stand for."""
    return int4.unpacked(qweight.numpy(), scales.numpy())


def test_two_planes_hold_eight_bits() -> None:
    """Each weight is off by half a step at most, of 119 steps to the largest of its group."""
    words = weights(6, 96).bfloat16()
    words[0, :GROUP] = 0
    words[1, :GROUP] = torch.linspace(-1, 1, GROUP)
    qweight, scales = ops.quantize_int4_planes(words, GROUP)
    assert (qweight.shape, scales.shape) == ((12, 48), (12, 3))
    assert torch.equal(scales[:6], 16 * scales[6:])
    held = unpacked(qweight[:6], scales[:6]) + unpacked(qweight[6:], scales[6:])
    exact = words.double().numpy()
    largest = np.abs(exact.reshape(6, 3, GROUP)).max(axis=2)
    steps = np.repeat(scales[6:].double().numpy(), GROUP, axis=1)
    # float16 rounds the step itself, so that the largest weights may lie a little beyond it.
    assert np.all(np.abs(held - exact) <= 0.5 * steps + 119 * steps * 2**-11)
    np.testing.assert_allclose(scales[6:].double().numpy(), largest / 119, rtol=2**-10)
    assert not held[0, :GROUP].any()
    assert {-119, 119} <= set(np.rint(held[1, :GROUP] / steps[1, 0]).astype(int).tolist())
    one = unpacked(*ops.quantize_int4(words, GROUP))
    assert np.abs(held - exact).mean() < np.abs(one - exact).mean() / 12


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rounded_inputs(
    planes: int, permuted: bool, dtype: torch.dtype
) -> None:
    made = (ops.quantize_int4, ops.quantize_int4_planes)[planes - 1](weights(40, 96), GROUP)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    weight = Int4Weight(*made, order.int() if permuted else None)
    matrix = Int4Matrix(weight, planes)
    assert (matrix.outputs, matrix.columns) == (40, 96)
    assert matrix.nbytes == planes * 40 * (48 + 6) + (4 * 96 if permuted else 0)
    held = unpacked(*made).reshape(planes, 40, 96).sum(axis=0)
    words = held.copy()
    if permuted:
        words[:, order.numpy()] = held
    np.testing.assert_allclose(matrix.words().double().numpy(), words, rtol=1e-6)
    inputs, bias = weights(3, 96, seed=2).to(dtype).view(1, 3, 96), weights(1, 40, seed=3)[0]
    rows = inputs[0][:, order] if permuted else inputs[0]
    seen = rows.double().numpy()
    wanted = torch.from_numpy(np.stack([int4.rounded(row) for row in seen]) @ held.T)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    outputs = matrix.product(inputs, None)
    assert (outputs.shape, outputs.dtype) == ((1, 3, 40), dtype)
    torch.testing.assert_close(outputs[0], wanted.to(dtype), **tolerance)
    torch.testing.assert_close(
        matrix.product(inputs, bias.to(dtype))[0],
        wanted.to(dtype) + bias.to(dtype),
        **tolerance,
    )
    assert matrix.product(inputs[0, 0], None).shape == (40,)


def test_a_matrix_is_of_whole_planes() -> None:
    weight = Int4Weight(*ops.quantize_int4(weights(5, 64), GROUP))
    with pytest.raises(ValueError, match="5 rows are not 2 planes"):
        Int4Matrix(weight, 2)
    with pytest.raises(ValueError, match=r"float32; it must be torch\.uint8"):
        Int4Weight(weights(5, 32), weight.scales)
    with pytest.raises(ValueError, match="outside the 64"):
        Int4Weight(weight.qweight, weight.scales, torch.full((64,), 64, dtype=torch.int32))


@pytest.mark.parametrize("planes", [1, 2])
def test_matrices_are_rounded_some_rows_at_a_time(planes: int) -> None:
    words = weights(1100, 64).bfloat16()
    layout = DenseLayout("model.x", 1100, 64, planes, GROUP)
    parts = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.shapes.items()
    }
    assert layout.nbytes == sum(part.nbytes for part in parts.values())
    round_into(words, planes, layout.group_size, parts["qweight"], parts["scales"])
    whole = (ops.quantize_int4, ops.quantize_int4_planes)[planes - 1](words, GROUP)
    assert torch.equal(parts["qweight"], whole[0])
    assert torch.equal(parts["scales"], whole[1])


LAYER = "model.layers.1."
ATTENTION_OUT = "model.layers.3.self_attn.o_proj"
# What drafts of each family run on codes in layer 1, beside the experts.
ATTENTION = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
LATENT = [f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "o_proj")]
KIMI = ("q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj", "o_proj")
BAILING = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
COMPRESSOR = ("compressor.kv_proj", "compressor.gate_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = [f"mlp.shared_experts.{name}" for name in MLP]
DENSE = {
    "qwen2_moe": (ATTENTION, [f"mlp.{name}" for name in MLP]),
    "qwen3_moe": (ATTENTION, []),
    "qwen3_vl_moe": (ATTENTION, [f"mlp.{name}" for name in MLP]),
    "mellum": (ATTENTION, []),
    "olmoe": (ATTENTION, []),
    "flex_olmo": (ATTENTION, []),
    "mimo_v2_flash": (ATTENTION, []),
    "mixtral": (ATTENTION, []),
    "phimoe": (ATTENTION, []),
    "deepseek_v2": ([*LATENT, "self_attn.q_proj"], SHARED),
    "sarvam_mla": ([*LATENT, "self_attn.q_proj"], SHARED),
    "glm4_moe": (ATTENTION, SHARED),
    "glm4v_moe": (ATTENTION, SHARED),
    "sarvam_moe": (ATTENTION, SHARED),
    "glm4_moe_lite": ([*LATENT, "self_attn.q_a_proj", "self_attn.q_b_proj"], SHARED),
    **dict.fromkeys(
        ("deepseek_v3", "mistral4", "kimi_k25", "deepseek_v32", "glm_moe_dsa", "glm5_next"),
        ([*LATENT, "self_attn.q_a_proj", "self_attn.q_b_proj"], SHARED),
    ),
    "deepseek_v4": (
        [
            f"self_attn.{name}"
            for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", *COMPRESSOR)
        ],
        SHARED,
    ),
    "dots1": (ATTENTION, SHARED),
    "hy_v3": (ATTENTION, SHARED),
    "afmoe": ([*ATTENTION, "self_attn.gate_proj"], SHARED),
    "exaone_moe": (ATTENTION, SHARED),
    "laguna": ([*ATTENTION, "self_attn.g_proj"], SHARED),
    "step3p7": ([*ATTENTION, "self_attn.g_proj"], SHARED),
    "solar_open": (ATTENTION, SHARED),
    "minimax_m2": (ATTENTION, []),
    "minimax_m3_vl": (
        ATTENTION,
        ["mlp.shared_experts.down_proj"],
    ),
    "ernie4_5_moe": (ATTENTION, SHARED),
    "hunyuan_v1_moe": (ATTENTION, [f"mlp.shared_mlp.{name}" for name in MLP]),
    "gpt_oss": (ATTENTION, []),
    "granitemoe": (ATTENTION, []),
    "kimi_linear": ([f"self_attn.{name}" for name in KIMI], SHARED),
    "bailing_hybrid": ([f"self_attn.{name}" for name in BAILING], SHARED),
    "nemotron_h": ([], [f"mixer.shared_experts.{name}" for name in MLP[1:]]),
    "granitemoehybrid": (
        ["mamba.in_proj", "mamba.out_proj"],
        ["shared_mlp.input_linear", "shared_mlp.output_linear"],
    ),
    "qwen3_5_moe": (
        [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")],
        [f"mlp.shared_expert.{name}" for name in MLP],
    ),
    "qwen4_exp": (
        [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")],
        [f"mlp.shared_expert.{name}" for name in MLP],
    ),
    "gemma4": (ATTENTION, [f"mlp.{name}" for name in MLP]),
    "lfm2_moe": (["conv.in_proj", "conv.out_proj"], []),
    "qwen3_next": (
        ["linear_attn.in_proj_qkvz", "linear_attn.out_proj"],
        [f"mlp.shared_expert.{name}" for name in MLP],
    ),
}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_which_layers_drafts_run_on_codes(family: str, tiny: Folder) -> None:
    opened = open_model(tiny(family))
    shapes, stored = opened.shape.draft_layers, stored_tensors(tiny(family))
    attention, mlp = DENSE[family]
    for choice, wanted, head in (
        ("none", [], False),
        ("shared", mlp, False),
        ("attention", attention + mlp, False),
        ("all", attention + mlp, True),
        ("auto", attention + mlp, True),
    ):
        layouts = DenseDraft.of(choice, shapes).layouts
        found = {name for name in layouts if name.startswith(LAYER)}
        assert found == {LAYER + name for name in wanted}
        assert ("lm_head" in layouts) == head
        for name, layout in layouts.items():
            # A head that is the embedding's has no matrix of its own there.
            tied = name == "lm_head" and opened.shape.tied
            module = "model.embed_tokens" if tied else name
            assert stored[f"{module}.weight"].shape == (layout.outputs, layout.columns)
            assert layout.planes == (2 if name == "lm_head" else 1)
    opened.close()


def test_a_shared_expert_runs_on_codes_and_its_gate_does_not(tiny: Folder) -> None:
    opened = open_model(tiny("qwen2_moe"))
    names = [shape.name for shape in opened.shape.draft_layers if "layers.2.mlp" in shape.name]
    assert names == [f"model.layers.2.mlp.shared_expert.{name}" for name in MLP]
    opened.close()


def test_rounded_codes_are_kept_and_read_again(tiny: Folder, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("olmoe"), model, ignore=shutil.ignore_patterns(".speq"))
    opened = open_model(model)
    tensors = opened.checkpoint.tensors
    asked: list[str] = []

    def words(name: str) -> Tensor:
        asked.append(name)
        return tensors[f"{name}.weight"][0].tensor(f"{name}.weight")

    def made(draft: DenseDraft) -> dict[str, Int4Weight]:
        codes = DenseCodes(draft, opened.checkpoint)
        found = {name: codes.weight(name, partial(words, name)) for name in draft.layouts}
        codes.finish()
        return found

    draft = DenseDraft.of("all", opened.shape.draft_layers)
    first = made(draft)
    assert asked == [*draft.layouts]
    again = made(draft)
    assert len(asked) == len(draft.layouts)
    for name, layout in draft.layouts.items():
        wanted = torch.empty_like(first[name].qweight), torch.empty_like(first[name].scales)
        round_into(words(name), layout.planes, layout.group_size, *wanted)
        for held in (first[name], again[name]):
            assert torch.equal(held.qweight, wanted[0])
            assert torch.equal(held.scales, wanted[1])
    # Another choice is another file; the experts' own is a third.
    asked.clear()
    fewer = DenseDraft.of("attention", opened.shape.draft_layers)
    assert [*made(fewer)] == asked == [name for name in draft.layouts if name != "lm_head"]
    experts = draft_file.candidate_paths(opened.checkpoint)[0]
    assert len([*experts.parent.glob("draft-int4-rtn-dense-*")]) >= 2
    opened.close()


def test_codes_are_counted_where_they_draft(tiny: Folder) -> None:
    opened = open_model(tiny("qwen2_moe"))
    source = open_draft("auto", opened.checkpoint, opened.store, opened.shape.experts)
    codes = DenseDraft.of("all", opened.shape.draft_layers)
    model_spec = ModelSpec.of_draft("model", opened, "float32", source.layout, codes)
    plain = replace(model_spec, dense_draft=DenseDraft({}))
    assert model_spec.base_bytes == plain.base_bytes == plain.draft_bytes
    assert model_spec.draft_bytes == model_spec.base_bytes + codes.nbytes
    exact = 4 * sum(each.outputs * each.columns for each in codes.layouts.values())
    reads, others = model_spec.pass_bytes, plain.pass_bytes
    assert reads.fixed_bytes == others.fixed_bytes == others.draft_fixed_bytes
    assert reads.draft_fixed_bytes == reads.fixed_bytes - exact + codes.nbytes
    assert reads.draft_token_bytes == others.draft_token_bytes
    budget = Budget.of(1 << 30, 64, True, opened.shape)
    by_draft = {way.drafter: way for way in candidates_of(model_spec, True) if way.codec == "raw"}
    assert demand_of(model_spec, by_draft["int4"], budget).draft_bytes == model_spec.draft_bytes
    assert demand_of(model_spec, by_draft["none"], budget).draft_bytes == 0
    source.close()
    opened.close()


@pytest.fixture(scope="module")
def quantised(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family with shared experts, MLA and a layer without experts, by GPTQ throughout."""
    out = tmp_path_factory.mktemp("quantised") / "gptq"
    quantise_to(out, tiny("deepseek_v2"), replace(SETTINGS, dense=True))
    return out


def test_a_gptq_folder_brings_the_codes_of_its_dense_layers(tiny: Folder, quantised: Path) -> None:
    opened = open_model(tiny("deepseek_v2"))
    checkpoint, store, shapes = opened.checkpoint, opened.store, opened.shape.draft_layers
    source = open_draft(str(quantised), checkpoint, store, opened.shape.experts, shapes)
    draft = dense_draft("all", shapes, source)
    rounded = [name for name, layout in draft.layouts.items() if not layout.brought]
    assert rounded == ["lm_head"]
    tensors = checkpoint.tensors

    def words(name: str) -> Tensor:
        return tensors[f"{name}.weight"][0].tensor(f"{name}.weight")

    codes = DenseCodes(draft, checkpoint)
    for name, layout in draft.layouts.items():
        matrix = Int4Matrix(codes.weight(name, partial(words, name)), layout.planes)
        exact = words(name)
        error = (matrix.words() - exact).square().sum() / exact.square().sum()
        assert error < (1e-4 if layout.planes == 2 else 0.04)
    assert dense_draft("none", shapes, source).layouts == {}
    source.close()
    opened.close()


def test_a_damaged_dense_layer_is_refused(tiny: Folder, quantised: Path, tmp_path: Path) -> None:
    folder = copy_folder(quantised, tmp_path / "damaged")
    name = "model.layers.0.self_attn.o_proj.scales"
    file = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name] = tensors[name][:, :-8].contiguous()
    save_file(tensors, file)
    with pytest.raises(SpeqError, match=r"o_proj\.scales is torch\.float16 \[1, 56\]; the model's"):
        Generator.from_pretrained(tiny("deepseek_v2"), "1GiB", draft=str(folder))


def test_exact_layers_are_residuals_of_the_drafts_codes(bundled: Path) -> None:
    """Held once, and the same tokens."""
    prompt = [*range(40, 60)]
    made = {}
    for form in ("raw", "residual"):
        generator = Generator.from_pretrained(
            bundled, "1GiB", draft="auto", draft_length=3, dense=form, context_length=64
        )
        result = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
        layers = generator.runtime.model.dense
        made[form] = result.token_ids, result.stats["acceptance_rate"]
        if form == "residual":
            exact, draft = (getattr(layers[ATTENTION_OUT], name) for name in ("exact", "draft"))
            assert exact.pair[0] is draft.weight.qweight
            assert layers["lm_head"].exact.codec == "lossless"
            assert exact.nbytes < 0.6 * 2 * exact.outputs * exact.columns
        generator.close()
    assert made["residual"] == made["raw"]


@pytest.mark.parametrize("options", [{"draft_length": 0}, {"draft_dense": "none"}])
def test_residuals_need_a_draft_of_dense_layers(bundled: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SpeqError, match="this run has no such draft; use dense lossless"):
        Generator.from_pretrained(bundled, "1GiB", dense="residual", **options)
