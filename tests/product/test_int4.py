"""Checkpoints published in INT4 as compressed-tensors packs it: the output is that of the words
that they stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.experts.expert_store import expert_slot, read_matrices
from speq.models.dequantised import load_dequantized
from speq.models.opened import open_model
from speq.planning.model_spec import ModelSpec
from speq.quantizing.models import pack
from tests.helpers.cells import Cell, loaded, outcomes
from tests.helpers.int4_files import quantization_config, write_int4
from tests.helpers.tiny_models import experts_alone, greedy_tokens, load_plain, write_model

NEW_TOKENS = 60
PROMPT = [*range(40, 60)]
# Groups, whether without zero points, and whether dense layers are in INT4 as well.
KINDS = {
    "qwen3_moe": (32, True, False),
    "deepseek_v3": (32, True, True),
    "qwen2_moe": (64, False, True),
    "mixtral": (128, False, False),
}
WIDTHS = {"mixtral": "intermediate_size"}
Made = tuple[Path, Path, Path]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model in INT4, packed, and the words that it stands for."""
    root, family = tmp_path_factory.mktemp("int4"), request.param
    group, symmetric, dense = KINDS[family]
    width = WIDTHS.get(family, "moe_intermediate_size")
    sizes = {"hidden_size": max(128, group), width: max(64, group)}
    source = write_model(root / "16", family, torch.bfloat16, **sizes)
    model = write_int4(root / "model", root / "words", source, group, symmetric, dense)
    pack(model, root / "packed")
    return model, root / "packed", root / "words"


@pytest.mark.parametrize(
    "cell",
    [
        Cell(0, "two slots", "own", codec="int4", drafter="ngram"),
        Cell(3, "half", "own", codec="int4", drafter="ngram", readers=4),
        Cell(3, "two slots", "own", "packed", codec="int4", drafter="ngram"),
        Cell(3, "half", "own", codec="int4", drafter="cached", prefetch="three-phase"),
    ],
)
def test_greedy_tokens_are_those_of_the_words(cell: Cell, made: Made) -> None:
    model, packed, words = made
    expected = greedy_tokens(load_plain(words), PROMPT, NEW_TOKENS)
    folder = packed if cell.store == "packed" else model
    generator, _ = loaded(cell, folder, "auto", "float32", len(PROMPT) + NEW_TOKENS)
    result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    seen = outcomes(generator.last_run.decode)
    assert result.stats["codec"] == "int4"
    assert generator.runtime.plan.items["draft"] == 0
    generator.close()
    assert result.token_ids == expected
    assert seen or cell.drafter == "ngram"


def test_words_of_experts_are_those_of_the_format(made: Made) -> None:
    model, packed, words = made
    plain = experts_alone(load_file(words / "model.safetensors"))
    for folder in (model, packed):
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


def test_words_are_those_of_compressed_tensors(made: Made) -> None:
    """The library that defines the format unpacks the published tensors of some modules."""
    model, _, words = made
    published, plain = (load_file(folder / "model.safetensors") for folder in (model, words))
    plain = experts_alone(plain)
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    modules = [name.removesuffix("weight_packed") for name in published if "_packed" in name]
    for module in modules[:: len(modules) // 12]:
        parts = {
            name.removeprefix(module): tensor
            for name, tensor in published.items()
            if name.startswith(f"{module}weight_")
        }
        made_weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert made_weight.dtype == torch.bfloat16
        assert torch.equal(made_weight, plain[f"{module}weight"]), module


def test_every_weight_is_that_of_the_words(made: Made) -> None:
    """Dense layers in INT4 too, and nothing that belongs to codes is left over."""
    model, _, words = made
    ours = load_plain(words, torch.bfloat16)
    opened = open_model(model)
    found = load_dequantized(opened.checkpoint, lambda name: True, dtype=torch.bfloat16)
    opened.close()
    assert found.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_a_plan_knows_the_size_before_the_weights(made: Made, tmp_path: Path) -> None:
    model, _, _ = made
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    spec = ModelSpec.of_config("model", tmp_path, "auto")
    opened = open_model(model)
    assert spec.codec.record_range == opened.store.codec.record_range
    assert (spec.codec.name, spec.draft) == ("int4", None)
    opened.close()


def copied(model: Path, path: Path) -> dict[str, Any]:
    """Copy a model; return its tensors."""
    path.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    return load_file(path / "model.safetensors")


FIRST = "model.layers.1.mlp.experts.0.down_proj.weight"


def cut(tensors: dict[str, Any], end: str) -> None:
    tensors[FIRST + end] = tensors[FIRST + end][:-1].contiguous()


def change(end: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def run(tensors: dict[str, Any]) -> None:
        tensors[FIRST + end] = value

    return run


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda tensors: tensors.pop(FIRST + "_scale"), "lacks its scales, .*down_proj.weight_sc"),
        (lambda tensors: tensors.pop(FIRST + "_packed"), "lacks down_proj of expert 0|has dtype"),
        (lambda tensors: cut(tensors, "_scale"), r"of int4 codes \[\d+, \d+\] it must be bfloat16"),
        (change("_scale", torch.ones(128, 2).half()), "it must be bfloat16"),
        (change("_shape", torch.tensor([1, 2])), r"says \[1, 2\], and .*_packed is"),
        (change("_zero_point", torch.zeros(16, 2).int()), "and config.json says otherwise"),
        (change("_g_idx", torch.zeros(64).int()), "has columns in another order"),
    ],
)
def test_parts_that_are_absent_or_wrong(
    damage: Callable[[dict[str, Any]], None],
    sentence: str,
    tmp_path: Path,
) -> None:
    source = write_model(
        tmp_path / "16", "qwen3_moe", torch.bfloat16, hidden_size=128, moe_intermediate_size=64
    )
    write_int4(tmp_path / "model", tmp_path / "words", source, 32, True, False)
    tensors = copied(tmp_path / "model", tmp_path / "damaged")
    damage(tensors)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=sentence):
        open_model(tmp_path / "damaged")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "eight bits": ({"num_bits": 8}, "with num_bits 8, and it is read with 4"),
    "floats": ({"type": "float"}, "with type 'float'"),
    "by channel": ({"strategy": "channel"}, "with strategy 'channel'"),
    "in another order": ({"actorder": "group"}, "with actorder 'group'"),
    "small groups": ({"group_size": 16}, "with group_size 16, and it is read with 32 and mult"),
    "no groups": ({"group_size": None}, "with group_size None"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_that_are_not_read(name: str, made: Made, tmp_path: Path) -> None:
    changed, sentence = CONFIGS[name]
    copied(made[0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changed
    path.write_text(json.dumps(config))
    with pytest.raises(SpeqError, match=sentence):
        Generator.from_pretrained(tmp_path / "model", "64MiB")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"format": "nvfp4-pack-quantized"}, "in the format 'nvfp4-pack-quantized' with 1 groups"),
        ({"config_groups": {}}, "with 0 groups of modules"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}} | {"b": {}}},
            "with 2 groups of modules",
        ),
        (
            {
                "config_groups": {
                    "a": {
                        "weights": {"num_bits": 4, "group_size": 32},
                        "input_activations": {"num_bits": 8},
                    }
                }
            },
            "with activations in fewer bits",
        ),
    ],
)
def test_other_formats_of_compressed_tensors(
    changed: dict[str, Any], sentence: str, made: Made, tmp_path: Path
) -> None:
    copied(made[0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = quantization_config(32, True, []) | changed
    path.write_text(json.dumps(config))
    with pytest.raises(SpeqError, match=sentence):
        open_model(tmp_path / "model")
