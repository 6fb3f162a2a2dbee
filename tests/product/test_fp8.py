"""Models published in FP8: the output is that of the words they stand for, whoever drafts and
wherever experts are read from.

The oracle is plain transformers on a checkpoint of those words, which tests/helpers/fp8_files.py
makes from the definition of the format.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from bench.lab import codec as bench_codec
from bench.lab.scaled_codes import codes_in, entropy_of
from speq import Generator, SpeqError
from speq.experts.codec import ExpertShape, own_codec
from speq.experts.expert_store import expert_slot, mean_moved_bytes, read_matrices
from speq.experts.int4 import Int4Layout
from speq.files.checkpoint import Checkpoint
from speq.measure import agreement
from speq.measure.plan import plan
from speq.models.dequantised import state_of
from speq.models.opened import open_model
from speq.planning.model_spec import useful_draft
from speq.quantizing.models import pack, quantize
from tests.helpers.cells import Cell, loaded, outcomes
from tests.helpers.fp8_files import FP8_FAMILIES, PUBLISHERS, SETTINGS, of_compressed, write_fp8
from tests.helpers.gptq_files import Packing, write_gptq
from tests.helpers.often import often
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model, write_perturbed

Folder = Callable[[str], Path]
NEW_TOKENS = 60
PROMPT = [*range(40, 60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The model of a family in FP8, and the words that it stands for."""
    root = tmp_path_factory.mktemp("fp8")

    @cache
    def folders(family: str) -> tuple[Path, Path]:
        source = write_model(root / f"{family}-16", family, torch.bfloat16, **FP8_FAMILIES[family])
        scales = torch.bfloat16 if family == "qwen3_moe" else torch.float32
        words = root / f"{family}-words"
        return write_fp8(root / family, words, source, scales), words

    return folders


@pytest.fixture(scope="module")
def expected(made: Callable[[str], tuple[Path, Path]]) -> Callable[[str, str], list[int]]:
    """The exact model's tokens, in a dtype."""

    @cache
    def tokens(family: str, dtype: str) -> list[int]:
        plain = load_plain(made(family)[1], getattr(torch, dtype))
        return greedy_tokens(plain, PROMPT, NEW_TOKENS)

    return tokens


CELLS = {
    "qwen3_moe": [
        Cell(0, "two slots", "own", codec="fp8"),
        Cell(3, "half", "own", codec="fp8"),
        Cell(3, "two slots", "poor", readers=4, codec="fp8", prefetch="three-phase"),
        Cell(3, "half", "gptq", codec="fp8", cache_policy="lookahead"),
        Cell(5, "half", "poor", codec="fp8", trees="large"),
        Cell(8, "all", "own", "packed", codec="fp8"),
        Cell(3, "two slots", "poor", "packed", 1, codec="fp8", prefetch="none"),
        Cell(3, "half", "own", codec="fp8", drafter="ngram"),
    ],
    "deepseek_v3": [
        Cell(3, "half", "own", codec="fp8"),
        Cell(1, "two slots", "poor", "packed", codec="fp8"),
    ],
    "laguna": [Cell(3, "half", "own", codec="fp8")],
    "step3p7": [Cell(3, "half", "own", codec="fp8")],
    "hy_v3": [Cell(3, "half", "poor", "packed", codec="fp8")],
    "glm5_next": [Cell(3, "half", "poor", "packed", codec="fp8", trees="small")],
    "minimax_m2": [
        Cell(3, "two slots", "own", codec="fp8"),
        Cell(3, "half", "poor", codec="fp8", trees="small"),
    ],
}


def folders_of(cell: Cell, model: Path, words: Path) -> tuple[Path, str]:
    """The model that a cell runs, and its draft option."""
    beside = model.parent / f"{model.name}-{cell.draft}"
    if cell.draft == "poor" and not beside.exists():
        write_perturbed(beside, words, noise=0.5)
    elif cell.draft == "gptq" and not beside.exists():
        write_gptq(beside, words, Packing(2, desc_act=True, group_size=16))
    draft = "auto" if cell.draft == "own" else str(beside)
    if cell.store == "plain":
        return model, draft
    packed = model.parent / f"{model.name}-packed"
    if not packed.exists():
        pack(model, packed)
    return packed, draft


def run_cell(cell: Cell, model: Path, words: Path, dtype: str, expected: list[int]) -> set[str]:
    folder, draft = folders_of(cell, model, words)
    generator, _ = loaded(cell, folder, draft, dtype, len(PROMPT) + len(expected))
    result = generator.generate(PROMPT, max_new_tokens=len(expected), ignore_eos=True)
    assert result.stats["codec"] == "fp8"
    assert result.token_ids == expected, cell
    steps = generator.last_run.decode
    generator.close()
    return outcomes(steps)


@pytest.mark.parametrize("family", often(FP8_FAMILIES, quick=1, wide=2))
def test_greedy_tokens_are_those_of_the_words(
    family: str, made: Callable[[str], tuple[Path, Path]], expected: Callable[[str, str], list[int]]
) -> None:
    seen: set[str] = set()
    for cell in CELLS[family]:
        seen |= run_cell(cell, *made(family), "float32", expected(family, "float32"))
    assert {"partial", "rejected"} <= seen


def test_greedy_tokens_in_float64(
    made: Callable[[str], tuple[Path, Path]], expected: Callable[[str, str], list[int]]
) -> None:
    cell = Cell(3, "half", "own", codec="fp8")
    run_cell(cell, *made("qwen3_moe"), "float64", expected("qwen3_moe", "float64"))


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_all_weights_are_the_words(
    family: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Of experts as published and packed, and of all else, bit for bit."""
    model, words = made(family)
    wanted = load_file(words / "model.safetensors")
    checkpoint = Checkpoint(model)
    state = state_of(checkpoint, lambda name: True)
    checkpoint.close()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    pack(model, tmp_path / "packed")
    exact, published, packed = (open_model(e) for e in (words, model, tmp_path / "packed"))
    slots = [expert_slot(opened.store) for opened in (exact, published, packed)]
    for layer in range(exact.store.num_layers):
        for expert in range(exact.store.num_experts):
            matrices, *found = (
                read_matrices(opened.store, layer, expert, slot)
                for opened, slot in zip((exact, published, packed), slots, strict=True)
            )
            for ours in found:
                assert torch.equal(ours[0], matrices[0])
                assert torch.equal(ours[1], matrices[1])
    assert mean_moved_bytes(published.store) < 0.6 * mean_moved_bytes(exact.store)
    for opened in (exact, published, packed):
        opened.close()


def test_words_are_those_of_transformers_where_blocks_are_whole(tmp_path: Path) -> None:
    """Its own dequantisation, of each tensor of codes."""
    source = write_model(
        tmp_path / "16", "qwen3_moe", torch.bfloat16, hidden_size=256, moe_intermediate_size=128
    )
    model = write_fp8(tmp_path / "model", tmp_path / "words", source)
    stored = load_file(model / "model.safetensors")
    checkpoint = Checkpoint(model)
    state = state_of(checkpoint, lambda name: True)
    checkpoint.close()
    codes = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert sum(".experts." in name for name in codes) == 3 * 8 * 3
    for name in codes:
        theirs = Fp8Dequantize(None)._dequantize_one(
            stored[name], stored[f"{name}_scale_inv"], torch.bfloat16
        )
        assert torch.equal(state[name].view(torch.int16), theirs.view(torch.int16))


def test_a_proof_compares_with_the_words_and_says_so(
    made: Callable[[str], tuple[Path, Path]],
) -> None:
    model, texts = str(made("qwen3_moe")[0]), ["Once upon a time there was a dog"]
    found = agreement.run(model, texts, memory_budget="64MiB", dtype="float32")
    assert found.passed
    assert found.rows[0]["max_logit_difference"] < 1e-3 * found.rows[0]["max_logit"]
    assert found.sentence.endswith(
        "of both, weights are bfloat16 words, each the FP8 code times its scale, rounded "
        "once; activations are not quantised"
    )


def test_plans_are_made_from_config_alone(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, _ = made("qwen3_moe")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    from_config, whole = (plan(each, "8MiB", dtype="float32") for each in (tmp_path, model))
    assert {residency_plan.codec for residency_plan in from_config.candidates} == {"fp8"}
    weights, blocks = 3 * 160 * 144, 3 * 2 * 2
    for made_plan in (from_config, whole):
        codec = made_plan.model_spec.codec
        assert weights + 4 * blocks <= codec.record_range[1] <= weights + 6 * 64
        assert made_plan.model_spec.words == torch.bfloat16
    assert from_config.model_spec.shape == whole.model_spec.shape
    assert from_config.model_spec.non_expert_bytes == whole.model_spec.non_expert_bytes


# Those whose codes no kernel multiplies.
DECODED = ("squares of 32", "groups")


@pytest.mark.parametrize("name", PUBLISHERS)
def test_publishers_of_fp8(name: str, tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """What shares a scale, and how scales are called, is the publisher's; words and tokens are by
    the format's definition.
    """
    source = tiny_bfloat16("qwen3_moe")
    model, words = tmp_path / "model", tmp_path / "words"
    write_fp8(model, words, source, publisher=PUBLISHERS[name])
    opened = open_model(model)
    tensors = load_file(words / "model.safetensors")
    state = state_of(opened.checkpoint, lambda name: True)
    assert state.keys() == tensors.keys()
    assert all(torch.equal(tensor, state[each]) for each, tensor in tensors.items())
    for layer, expert in ((0, 0), (1, 3)):
        slot = expert_slot(opened.store)
        matrices = read_matrices(opened.store, layer, expert, slot)
        wanted = (
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.{each}_proj.weight"]
            for each in ("gate", "up", "down")
        )
        gate, up, down = wanted
        assert torch.equal(matrices[0], torch.cat([gate, up])) and torch.equal(matrices[1], down)
    opened.close()
    expected = greedy_tokens(load_plain(words), PROMPT, 12)
    pack(model, tmp_path / "packed")
    for folder in (model, tmp_path / "packed"):
        codec = "raw" if name in DECODED and folder is model else "auto"
        options = {"dtype": "float32", "draft": "none", "profile": "none", "codec": codec}
        budget = "920KiB" if name in DECODED else "800KiB"
        with closing(Generator.from_pretrained(folder, budget, **options)) as generator:
            assert generator.runtime.plan.slots < 24
            made = generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        assert made.stats["codec"] == ("raw" if name in DECODED else "fp8")
        assert made.token_ids == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "token"}, "with strategy 'token', and it is read with 'channel'"),
        ({"strategy": "group"}, "with group_size None, and it is read with 128"),
        ({"num_bits": 4}, "with num_bits 4, and it is read with 8"),
        ({"type": "int"}, "with type 'int', and it is read with 'float'"),
        ({"symmetric": False}, "with symmetric False, and it is read with True"),
        (
            {"strategy": "block", "block_structure": [64, 0]},
            r"with block_structure \[64, 0\], and it is read with \[128, 128\]",
        ),
    ],
)
def test_other_scales_of_compressed_tensors(
    changes: dict[str, Any], sentence: str, tiny_bfloat16: Folder, tmp_path: Path
) -> None:
    model = write_fp8(
        *(tmp_path / "model", tmp_path / "words", tiny_bfloat16("qwen3_moe")),
        publisher=PUBLISHERS["channel"],
    )
    settings = of_compressed("channel")
    settings["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(SpeqError, match=sentence):
        open_model(changed(model, tmp_path / "changed", **settings))


def test_two_kinds_of_scales_are_refused(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    model = write_fp8(
        *(tmp_path / "model", tmp_path / "words", tiny_bfloat16("qwen3_moe")),
        publisher=PUBLISHERS["channel"],
    )
    settings, other = of_compressed("channel"), of_compressed("tensor")
    settings["config_groups"]["group_1"] = other["config_groups"]["group_0"]
    with pytest.raises(SpeqError, match="with 2 kinds of scales of FP8, and one kind is read"):
        open_model(changed(model, tmp_path / "changed", **settings))


def changed(model: Path, out: Path, **settings: Any) -> Path:
    """A copy with other settings of its format."""
    out.mkdir()
    for file in model.iterdir():
        (out / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = SETTINGS | settings
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quant_method": "nvfp4"}, r"is quantised \(nvfp4\); give the original"),
        ({"weight_block_size": [64]}, r"with weight_block_size \[64\], and it is read"),
        ({"weight_block_size": [64, 64]}, r"it must be .* \[3, 3\]"),
        ({"weight_block_size": None}, "weight lacks its scales, .*weight_scale; "),
        ({"fmt": "e5m2"}, "with fmt 'e5m2', and it is read with 'e4m3'"),
        ({"activation_scheme": "fixed"}, "activation_scheme 'fixed'.* read with 'dynamic'"),
    ],
)
def test_other_formats_are_refused_by_name(
    settings: dict[str, Any],
    sentence: str,
    made: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    with pytest.raises(SpeqError, match=sentence):
        open_model(changed(made("qwen3_moe")[0], tmp_path / "model", **settings))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda name, scales: {}, "lacks its scales"),
        (lambda name, scales: {name: scales[:1].clone()}, r"must be .* or float8_e8m0fnu \[2, 2\]"),
        (lambda name, scales: {name: scales.half()}, "is torch.float16"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    damage: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    sentence: str,
    made: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    model = changed(made("qwen3_moe")[0], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    tensors |= damage(name, tensors.pop(name))
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=sentence):
        open_model(model)


def test_codes_in_a_model_of_words_are_refused(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model = changed(made("qwen3_moe")[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeqError, match=r"has dtype torch\.float8_e4m3fn; exact weights are"):
        open_model(model)


@pytest.mark.parametrize("codec", ["raw", "lossless", "residual", "mxfp4"])
def test_other_codecs_are_refused(
    codec: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, words = made("qwen3_moe")
    sentence = f"codec {codec} codes .* the model's experts are published in fp8; use codec fp8"
    with pytest.raises(SpeqError, match=sentence):
        Generator.from_pretrained(model, "64MiB", codec=codec)
    with pytest.raises(SpeqError, match=sentence):
        pack(model, tmp_path / "packed", codec=codec)
    sentence = "codec fp8 codes what was published in fp8 and the model's experts are bfloat16"
    with pytest.raises(SpeqError, match=sentence):
        Generator.from_pretrained(words, "64MiB", codec="fp8")


@pytest.mark.parametrize(
    ("published", "offered"), [("words", True), ("fp8", True), ("mxfp4", False)]
)
def test_a_draft_as_large_as_the_experts_is_not_offered(published: str, offered: bool) -> None:
    codec = own_codec(ExpertShape(2048, 768, torch.bfloat16, published))
    layout = Int4Layout(2048, 768)
    assert (useful_draft(layout, codec) is layout) == offered


def test_entropy_of_codes(made: Callable[[str], tuple[Path, Path]]) -> None:
    """By hand, of all experts together."""
    model, _ = made("deepseek_v3")
    [row] = bench_codec.run(str(model), bench_codec.CodecSettings()).rows
    tensors = load_file(model / "model.safetensors")
    pattern = re.compile(r"experts\.\d+\..*weight(_scale_inv)?$")
    experts = {name: tensor for name, tensor in tensors.items() if pattern.search(name)}
    codes = Counter[int]()
    for tensor in experts.values():
        if tensor.dtype == torch.float8_e4m3fn:
            codes.update(tensor.view(torch.uint8).flatten().tolist())
    total = codes.total()
    entropy = -sum(n / total * math.log2(n / total) for n in codes.values())
    scales = sum(tensor.numel() for tensor in experts.values() if tensor.dtype == torch.float32)
    assert row["codec"] == "fp8"
    assert row["entropy_bits"] == pytest.approx(entropy + 32 * scales / total)
    assert 8 < row["bits_per_weight"] < 8 + 8 * 6 * 64 / (3 * 64 * 32)
    assert row["encode_gb_per_s"] is None and row["decode_gb_per_s"] > 0


def test_codes_of_four_bits_are_taken_apart() -> None:
    packed = torch.tensor([0x21, 0x43, 0xFF], dtype=torch.uint8)
    assert sorted(codes_in(packed, 4).tolist()) == [1, 2, 3, 4, 15, 15]
    assert codes_in(packed, 8).tolist() == [0x21, 0x43, 0xFF]
    assert entropy_of(torch.tensor([1, 1, 0, 2])) == pytest.approx(1.5)


def test_quantising_takes_words(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="is published in fp8; speq quantize takes weights of 16"):
        quantize(made("qwen3_moe")[0], out=tmp_path / "draft")
