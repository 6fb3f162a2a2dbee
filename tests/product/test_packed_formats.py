"""Checkpoints in INT4 by compressed-tensors, GPTQ and AWQ, and in NVFP4 by ModelOpt and
compressed-tensors: the output is that of the words which they stand for.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.cli.plan import findings
from speq.experts.expert_store import expert_slot, read_matrices
from speq.files.published_format import DECODED, format_of
from speq.measure import agreement
from speq.measure.plan import plan
from speq.models.dequantised import load_dequantized
from speq.models.opened import open_model
from speq.planning.model_spec import ModelSpec
from speq.quantizing.models import pack
from tests.helpers.cells import Cell, loaded, outcomes
from tests.helpers.often import often
from tests.helpers.packed_files import (
    KINDS,
    Int4Kind,
    Mxfp4Kind,
    Nvfp4Kind,
    quantization_config,
    write_packed,
)
from tests.helpers.tiny_models import experts_alone, greedy_tokens, load_plain, write_model

NEW_TOKENS = 60
PROMPT = [*range(40, 60)]
WIDTHS = {"mixtral": "intermediate_size"}


@dataclass(frozen=True)
class Made:
    """A model in INT4 or NVFP4, packed, and the words that it stands for."""

    model: Path
    packed: Path
    words: Path
    codec: str


def family_in(name: str) -> str:
    return name.split()[0]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root, kind = tmp_path_factory.mktemp("packed"), KINDS[request.param]
    family = family_in(request.param)
    width = WIDTHS.get(family, "moe_intermediate_size")
    sizes = {"hidden_size": max(128, kind.group), width: max(64, kind.group)}
    source = write_model(root / "16", family, torch.bfloat16, **sizes)
    model = write_packed(root / "model", root / "words", source, kind)
    pack(model, root / "packed")
    return Made(model, root / "packed", root / "words", kind.codec)


@pytest.mark.parametrize(
    "cell",
    often(
        [
            Cell(3, "half", "own", drafter="ngram", readers=4),
            Cell(3, "two slots", "own", "packed", drafter="ngram"),
            Cell(3, "half", "own", drafter="cached", prefetch="three-phase"),
            Cell(0, "two slots", "own", drafter="ngram"),
        ],
        quick=1,
        wide=1,
    ),
)
def test_greedy_tokens_are_those_of_the_words(cell: Cell, made: Made) -> None:
    expected = greedy_tokens(load_plain(made.words), PROMPT, NEW_TOKENS)
    folder = made.packed if cell.store == "packed" else made.model
    cell = replace(cell, codec=made.codec)
    generator, _ = loaded(cell, folder, "auto", "float32", len(PROMPT) + NEW_TOKENS)
    result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    seen = outcomes(generator.last_run.decode)
    assert result.stats["codec"] == made.codec
    assert generator.runtime.plan.items["draft"] == 0
    generator.close()
    assert result.token_ids == expected
    assert seen or cell.drafter == "ngram"


@pytest.mark.parametrize("made", ["qwen3_moe by act-order"], indirect=True)
@pytest.mark.parametrize("codec", ["raw", "lossless", "residual"])
def test_decoded_experts_are_held_by_every_codec_of_words(
    codec: str, made: Made, tmp_path: Path
) -> None:
    """As they are read, and packed; an INT4 draft is rounded from their words."""
    expected = greedy_tokens(load_plain(made.words), PROMPT, NEW_TOKENS)
    pack(made.model, tmp_path / "packed", codec=codec)
    for folder in (made.model, tmp_path / "packed"):
        cell = Cell(3, "half", "own", codec=codec)
        generator, _ = loaded(cell, folder, "auto", "float32", len(PROMPT) + NEW_TOKENS)
        result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        seen = outcomes(generator.last_run.decode)
        assert generator.runtime.plan.items["draft"] > 0
        generator.close()
        assert result.stats["codec"] == codec
        assert result.token_ids == expected
        assert seen


@pytest.mark.parametrize("made", ["qwen3_moe by act-order"], indirect=True)
def test_plans_and_checks_tell_of_decoding(made: Made, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((made.model / "config.json").read_bytes())
    for folder, scales in ((tmp_path, 0), (made.model, 1)):
        planned = plan(str(folder), "64MiB", dtype="float32")
        assert DECODED in findings(planned)
        weights, groups = 3 * 128 * 64, 3 * 128 * 64 // 32
        # Codes; scales, zero points and the groups of inputs.
        inputs = 4 * (128 + 128 + 64)
        taken = weights // 2 + scales * (2 * groups + groups // 2 + inputs)
        assert planned.model_spec.published_bytes == taken
        assert planned.model_spec.codec.shape.nbytes == 2 * weights
    texts = ["Once upon a time there was a dog"]
    found = agreement.run(str(made.model), texts, memory_budget="64MiB", dtype="float32")
    assert found.passed and found.sentence.endswith(DECODED)


@pytest.mark.parametrize("groups", [[-1, 2], [0, 9]])
def test_groups_that_are_not_there_are_refused(groups: list[int], tmp_path: Path) -> None:
    """As an expert is read: the groups of all of a model's inputs are many bytes."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    source = write_model(tmp_path / "16", "qwen3_moe", torch.bfloat16, **sizes)
    kind = Int4Kind(32, True, False, "gptq", order="static")
    write_packed(tmp_path / "model", tmp_path / "words", source, kind)
    tensors = copied(tmp_path / "model", tmp_path / "damaged")
    tensors[FIRST + "g_idx"][:2] = torch.tensor(groups)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    opened = open_model(tmp_path / "damaged")
    with pytest.raises(
        SpeqError, match=r"g_idx has groups .* and .*qweight has 2, which are count"
    ):
        read_matrices(opened.store, 1, 0, expert_slot(opened.store))
    opened.close()


def test_words_of_experts_are_those_of_the_format(made: Made) -> None:
    plain = experts_alone(load_file(made.words / "model.safetensors"))
    for folder in (made.model, made.packed):
        opened = open_model(folder)
        slot = expert_slot(opened.store)
        names = opened.shape.experts.names
        for layer in range(opened.store.num_layers):
            for expert in range(opened.store.num_experts):
                found = read_matrices(opened.store, layer, expert, slot)
                gate, up, down = (
                    next(
                        tensor
                        for name, tensor in plain.items()
                        if (at := names.matrix(name)) is not None
                        and (at.layer, at.expert) == (opened.shape.experts.layers[layer], expert)
                        and at.projection == projection
                    )
                    for projection in ("gate_proj", "up_proj", "down_proj")
                )
                for ours, theirs in zip(found, (torch.cat([gate, up]), down), strict=True):
                    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        opened.close()


COMPRESSED = ["qwen3_moe", "deepseek_v3", "mixtral", "mixtral in nvfp4", "qwen3_moe in mxfp4"]
COMPRESSORS = {
    "int4": PackedQuantizationCompressor,
    "nvfp4": NVFP4PackedCompressor,
    "mxfp4": MXFP4PackedCompressor,
}


@pytest.mark.parametrize("made", COMPRESSED, indirect=True)
def test_words_are_those_of_compressed_tensors(made: Made) -> None:
    """The library that defines the format unpacks the published tensors of some modules."""
    published, plain = (
        load_file(folder / "model.safetensors") for folder in (made.model, made.words)
    )
    plain = experts_alone(plain)
    config = json.loads((made.model / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    modules = [name.removesuffix("weight_packed") for name in published if "_packed" in name]
    for module in modules[:: len(modules) // 12]:
        parts = {
            name.removeprefix(module): tensor
            for name, tensor in published.items()
            if name.startswith(f"{module}weight_")
        }
        made_weight = COMPRESSORS[made.codec].decompress(parts, scheme)["weight"]
        assert made_weight.dtype == torch.bfloat16
        assert torch.equal(made_weight, plain[f"{module}weight"]), module


def test_every_weight_is_that_of_the_words(made: Made) -> None:
    """Dense layers in INT4 too, and nothing that belongs to codes is left over."""
    ours = load_plain(made.words, torch.bfloat16)
    opened = open_model(made.model)
    found = load_dequantized(opened.checkpoint, lambda name: True, dtype=torch.bfloat16)
    opened.close()
    assert found.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_a_plan_knows_the_size_before_the_weights(made: Made, tmp_path: Path) -> None:
    for path in made.model.glob("*config.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spec = ModelSpec.of_config("model", tmp_path, "auto")
    opened = open_model(made.model)
    assert spec.codec.record_range == opened.store.codec.record_range
    assert spec.reading_bytes == opened.store.reading_bytes
    assert (spec.codec.name, spec.draft is None) == (made.codec, made.codec != "raw")
    opened.close()


def copied(model: Path, path: Path) -> dict[str, Any]:
    """Copy a model; return its tensors."""
    path.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    return load_file(path / "model.safetensors")


FIRST = "model.layers.1.mlp.experts.0.down_proj."
Tensors = dict[str, Any]


def cut(end: str) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        tensors[FIRST + end] = tensors[FIRST + end][:-1].contiguous()

    return run


def change(end: str, value: Any) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        tensors[FIRST + end] = value

    return run


def drop(end: str) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        tensors.pop(FIRST + end)

    return run


@pytest.mark.parametrize(
    ("packing", "damage", "sentence"),
    [
        ("compressed-tensors", drop("weight_scale"), "lacks its scales, .*down_proj.weight_sc"),
        ("compressed-tensors", drop("weight_packed"), "lacks down_proj of expert 0|has dtype"),
        ("compressed-tensors", cut("weight_scale"), r"of int4 codes \[\d+, \d+\] .* be bfloat16"),
        ("compressed-tensors", change("weight_scale", torch.ones(128, 2).half()), "be bfloat16"),
        (
            "compressed-tensors",
            change("weight_shape", torch.tensor([1, 2])),
            r"says \[1, 2\], and ",
        ),
        ("compressed-tensors", change("weight_zero_point", torch.zeros(16, 2).int()), "otherwise"),
        ("compressed-tensors", change("weight_g_idx", torch.zeros(64).int()), "has no actorder"),
        ("mxfp4", drop("weight_scale"), "lacks its scales, .*down_proj.weight_scale"),
        ("mxfp4", cut("weight_scale"), r"mxfp4 codes \[128, 32\] it must be .* \[128, 2\]"),
        ("mxfp4", change("weight_packed", torch.ones(128, 8).byte()), "of whole blocks of 32, two"),
        ("act-order", drop("g_idx"), r"groups of inputs of .*, is absent; it must be int32 \[64\]"),
        ("act-order", cut("g_idx"), r"is torch.int32 \[63\]; it must be int32 \[64\]"),
        ("gptq", drop("scales"), "lacks its scales, .*down_proj.scales"),
        ("gptq", drop("qzeros"), "has no zero points, .*down_proj.qzeros, and config.json says"),
        ("gptq", cut("qzeros"), r"of INT4 codes \[8, 128\] it must be int32 \[2, 16\]"),
        ("gptq", change("scales", torch.ones(2, 128)), "must be float16|must be bfloat16"),
        ("gptq", cut("qweight"), "must be of rows of whole groups of 32"),
        ("awq", drop("qzeros"), "has no zero points, .*down_proj.qzeros"),
        (
            "awq",
            change("qweight", torch.zeros(64, 8).int()),
            r"be int32 \[2, 8\]",
        ),
        ("awq", change("qweight", torch.zeros(64).int()), "must be of rows of whole groups of 32"),
        ("modelopt", drop("weight_scale"), "lacks its scales, .*down_proj.weight_scale"),
        ("modelopt", cut("weight_scale"), r"nvfp4 codes \[128, 32\] it must be .* \[128, 4\]"),
        (
            "modelopt",
            drop("weight_scale_2"),
            "scale_2, the scale of all of .*, is absent",
        ),
        (
            "modelopt",
            change("weight_scale_2", torch.ones(2)),
            r"float32 \[2\]; it must be one",
        ),
        ("modelopt", change("weight", torch.ones(128, 4).byte()), "of rows of whole blocks of 16"),
        ("modelopt", change("pre_quant_scale", torch.ones(64)), "for inputs that .* scales, which"),
    ],
)
def test_parts_that_are_absent_or_wrong(
    packing: str, damage: Callable[[Tensors], None], sentence: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    source = write_model(tmp_path / "16", "qwen3_moe", torch.bfloat16, **sizes)
    others = {
        "modelopt": Nvfp4Kind("modelopt"),
        "mxfp4": Mxfp4Kind(False),
        "act-order": Int4Kind(32, True, False, "gptq", order="static"),
    }
    kind = others.get(packing) or Int4Kind(32, True, False, packing)
    write_packed(tmp_path / "model", tmp_path / "words", source, kind)
    tensors = copied(tmp_path / "model", tmp_path / "damaged")
    damage(tensors)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=sentence):
        open_model(tmp_path / "damaged")


WEIGHTS = {"num_bits": 4, "group_size": 32}
MIXED_LAYERS = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "MXFP8"}}
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "eight bits": ("weights", {"num_bits": 8}, "with num_bits 8, and it is read with 4"),
    "floats": ("weights", {"type": "float"}, "with type 'float'"),
    "by token": ("weights", {"strategy": "token"}, "with strategy 'token'"),
    "in another order": ("weights", {"actorder": "other"}, "with actorder 'other'"),
    "no inputs": ("weights", {"group_size": 0}, "with group_size 0, and it is read with a number"),
    "no groups": ("weights", {"group_size": None}, "with group_size None"),
    "nvfp4": (
        *("compressed-tensors", {"format": "nvfp4-pack-quantized"}),
        "with type 'int', and it is read with 'float'",
    ),
    "mxfp4": (
        *("compressed-tensors", {"format": "mxfp4-pack-quantized"}),
        "with type 'int', and it is read with 'float'",
    ),
    "mxfp8 packed": (
        *("compressed-tensors", {"format": "mxfp8-pack-quantized"}),
        "in the format 'mxfp8-pack-quantized' with 1 groups",
    ),
    "no modules": ("compressed-tensors", {"config_groups": {}}, "with 0 groups of modules"),
    "two kinds": (
        *("compressed-tensors", {"config_groups": {"a": {"weights": WEIGHTS}, "b": {}}}),
        "with 2 groups of modules",
    ),
    "activations": (
        "compressed-tensors",
        {"config_groups": {"a": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
        "with activations in fewer bits",
    ),
    "gptq in eight bits": ("gptq", {"bits": 8}, "with bits 8, and it is read with 4"),
    "gptq by activation": ("gptq", {"desc_act": "yes"}, "with desc_act 'yes', and it is read with"),
    "gptq for marlin": ("gptq", {"checkpoint_format": "marlin"}, "with checkpoint_format 'marlin'"),
    "marlin by a flag": ("gptq", {"is_marlin_format": True}, "with checkpoint_format 'marlin'"),
    "gptq in halves": ("gptq", {"group_size": 0.5}, "with group_size 0.5, and it is read with"),
    "gptq in bytes": ("gptq", {"pack_dtype": "int8"}, "with pack_dtype 'int8'"),
    "gptq rotated": ("gptq", {"rotation": "hadamard"}, "with rotation 'hadamard'"),
    "gptq mixed": ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"with dynamic \{'\+:"),
    "awq in eight bits": ("awq", {"bits": 8}, "with bits 8, and it is read with 4"),
    "awq for gemv": ("awq", {"version": "gemv"}, "with version 'gemv', and it is read with 'gemm'"),
    "awq without zeros": ("awq", {"zero_point": False}, "with zero_point False"),
    "awq without groups": ("awq", {"group_size": -2}, "with group_size -2"),
    "nvfp4 in groups of 32": ("modelopt", {"group_size": 32}, "with group_size 32, and it is read"),
    "nvfp4 by awq": ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ: NVFP4_AWQ"),
    "blocks of fp8 by modelopt": (
        "modelopt",
        {"quant_algo": "FP8_PB_WO"},
        "modelopt FP8_PB_WO: FP8_PB_WO",
    ),
    "mxfp8 beside": (
        *("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED_LAYERS}),
        r"modelopt MIXED_PRECISION: MXFP8, NVFP4\)",
    ),
    "another quantiser": ("awq", {"quant_method": "eetq"}, r"is quantised \(eetq\)"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("nested", [False, True])
def test_kinds_that_are_not_read(name: str, nested: bool, tmp_path: Path) -> None:
    packing, changed, sentence = CONFIGS[name]
    packed_by = "compressed-tensors" if packing == "weights" else packing
    settings = Int4Kind(32, True, False, packed_by).settings
    if packing == "modelopt":
        settings = Nvfp4Kind(packing).settings
    of = settings["config_groups"]["group_0"]["weights"] if packing == "weights" else settings
    of |= changed
    config: dict[str, Any] = {"quantization_config": settings}
    with pytest.raises(SpeqError, match=sentence):
        format_of({"text_config": config} if nested else config, tmp_path)


def test_a_generator_says_what_is_not_read(made: Made, tmp_path: Path) -> None:
    copied(made.model, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = quantization_config(Int4Kind(32, True, False, "awq"))
    config["quantization_config"]["bits"] = 3
    path.write_text(json.dumps(config))
    with pytest.raises(SpeqError, match="with bits 3, and it is read with 4"):
        Generator.from_pretrained(tmp_path / "model", "64MiB")


@pytest.mark.parametrize(
    ("packing", "file", "beside", "agrees"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, True),
        ("gptq", "quantize_config.json", {"quant_method": "gptq", "sym": True, "bits": 4}, True),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 128}, False),
        ("gptq", "quantize_config.json", {"bits": 4, "desc_act": True}, False),
        ("gptq", "quantize_config.json", {"bits": 4, "checkpoint_format": "gptq_v2"}, False),
        ("gptq_v2", "quantize_config.json", {"bits": 4, "checkpoint_format": "gptq_v2"}, True),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, True),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, False),
        ("awq", "quantize_config.json", {"bits": 4, "quant_method": "gptq"}, False),
        ("awq", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, False),
    ],
)
def test_a_quantisers_file_agrees_or_is_refused(
    packing: str, file: str, beside: dict[str, Any], agrees: bool, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(beside))
    config = {"quantization_config": quantization_config(Int4Kind(32, True, False, packing))}
    if agrees:
        assert format_of(config, tmp_path).name == "int4"
        return
    with pytest.raises(SpeqError, match=f"as {file} says and config.json does not"):
        format_of(config, tmp_path)


@pytest.mark.parametrize(("algorithm", "name"), [("FP8", "fp8"), ("NVFP4", "nvfp4")])
def test_modelopts_file_counts_where_the_configuration_says_nothing(
    algorithm: str, name: str, tmp_path: Path
) -> None:
    settings = {"quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    found = format_of({}, tmp_path)
    assert found.name == name
    assert (found.packed is None) == (name == "fp8")
    assert found.fp8.scales == ("_scale" if name == "fp8" else "_scale_inv")
