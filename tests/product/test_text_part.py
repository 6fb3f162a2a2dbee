"""A model of text that is published as a part of one of pictures and text."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.files.text_part import TextModelPart
from speq.models.families import FAMILIES
from speq.models.opened import open_model
from tests.helpers.fp8_files import write_fp8
from tests.helpers.picture_files import FILE, PREFIX, stored_tensors
from tests.helpers.quantising import quantise_to
from tests.helpers.tiny_models import experts_alone, greedy_tokens, load_plain, write_model

FAMILY = "qwen3_5_moe"
PROMPT, TOKENS = [5, 6, 7], 24
Folder = Callable[[str], Path]


def config_of(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((path / "config.json").read_text())
    return content


def run(path: Path, budget: str = "16MiB") -> list[int]:
    generator = Generator.from_pretrained(path, budget, dtype="float32", draft_length=3)
    result = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    generator.close()
    assert result.stats["draft_length_mean"] > 0
    return list(result.token_ids)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".speq"))
    return target


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"),
    ],
)
def test_names_of_the_part_and_back(stored: str, name: str) -> None:
    part = FAMILIES[FAMILY].text_part
    assert part is not None
    assert part.called(stored) == name
    assert {re.sub(*each, stored) for each in part.renaming.items()} == {name}
    assert part.stored(name) == stored
    assert FAMILIES[FAMILY].holds(name, 4) == ("visual" not in name and "mtp" not in name)
    assert part.called(name) == name


@pytest.mark.parametrize("family", ["kimi_k25", "mistral4"])
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("vision_tower.blocks.0.norm.weight", "vision_tower.blocks.0.norm.weight"),
    ],
)
def test_names_of_a_part_with_its_head(family: str, stored: str, name: str) -> None:
    part = FAMILIES[family].text_part
    assert part is not None
    assert part.called(stored) == part.called(name) == name
    assert part.stored(name) == stored
    made = stored
    for each in part.renaming.items():
        made = re.sub(*each, made)
    assert made == name
    assert FAMILIES[family].holds(name, 4) == ("vision" not in name)


def test_other_parts_are_left_unread(tiny: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """They are no tensors of the model: nobody is warned of them, and no memory is planned."""
    opened = open_model(tiny(FAMILY))
    assert "model.visual.pos_embed.weight" in opened.checkpoint.tensors
    text = {
        name: tensor.numel()
        for name, tensor in stored_tensors(tiny(FAMILY)).items()
        if not name.startswith(("model.visual.", "mtp.")) and ".experts." not in name
    }
    assert opened.shape.resident_weights == sum(text.values())
    assert opened.converted_bytes(torch.bfloat16) == 4 * sum(text.values())
    opened.close()
    with caplog.at_level(logging.WARNING, "speq"):
        expected = greedy_tokens(load_plain(tiny(FAMILY)), PROMPT, TOKENS)
        assert run(tiny(FAMILY)) == expected
    assert "has no use for" not in caplog.text


@pytest.mark.wide
@pytest.mark.parametrize("family", [FAMILY, "gemma4"])
def test_the_part_alone_and_in_shards(family: str, tiny: Folder, tmp_path: Path) -> None:
    """As transformers saves the model of text, and as large checkpoints are published."""
    expected = greedy_tokens(load_plain(tiny(family)), PROMPT, TOKENS)
    alone = copied(tiny(family), tmp_path / "alone")
    (alone / "config.json").write_text(json.dumps(config_of(alone)["text_config"]))
    save_file(stored_tensors(alone), alone / FILE, metadata={"format": "pt"})
    assert run(alone) == expected
    sharded = copied(tiny(family), tmp_path / "sharded")
    tensors = load_file(sharded / FILE)
    (sharded / FILE).unlink()
    shards = {name: f"{at % 2}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        of_file = {name: tensors[name] for name, held in shards.items() if held == file}
        save_file(of_file, sharded / file, metadata={"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (sharded / "model.safetensors.index.json").write_text(index)
    assert run(sharded) == expected


def test_kimi_k2_whose_configuration_transformers_lacks(tiny: Folder, tmp_path: Path) -> None:
    """It is DeepSeek-V3's by another name, as which plain transformers reads it."""
    alone, plain = (copied(tiny("kimi_k25"), tmp_path / name) for name in ("alone", "plain"))
    tensors = {n: t for n, t in stored_tensors(alone).items() if n.startswith(("model.", "lm_"))}
    for folder, name in ((alone, "kimi_k2"), (plain, "deepseek_v3")):
        config = config_of(folder)["text_config"] | {"model_type": name}  # type: ignore[operator]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
    assert run(alone) == greedy_tokens(load_plain(plain), PROMPT, TOKENS)


@pytest.mark.wide
def test_in_fp8_with_experts_alone(tmp_path: Path) -> None:
    """The layout of checkpoints in FP8: of several blocks, whose scales go by the names of both."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 144}
    source = write_model(tmp_path / "source", FAMILY, torch.bfloat16, **sizes)
    alone = experts_alone(load_file(source / FILE))
    save_file(alone, source / FILE, metadata={"format": "pt"})
    path = write_fp8(tmp_path / "fp8", tmp_path / "words", source)
    assert run(path, "64MiB") == greedy_tokens(load_plain(tmp_path / "words"), PROMPT, TOKENS)


def test_packs_and_drafts_keep_the_names_on_disk(tiny: Folder, tmp_path: Path) -> None:
    """So that others who know the whole model find all of it."""
    source = load_file(tiny(FAMILY) / FILE)
    others = {name for name in source if ".experts." not in name or name.startswith("mtp.")}
    opened = open_model(tiny(FAMILY))
    assert isinstance(opened.store, SafetensorsExpertStore)
    pack(opened.checkpoint, opened.store, tmp_path / "packed")
    opened.close()
    packed = load_file(tmp_path / "packed" / FILE)
    assert packed.keys() == others
    assert all(torch.equal(tensor, source[name]) for name, tensor in packed.items())
    quantise_to(tmp_path / "draft", tiny(FAMILY))
    index = tmp_path / "draft" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].keys()
    module = f"{PREFIX}layers.2.mlp.experts.7.down_proj"
    assert {name for name in names if name.startswith(module)} == {
        f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
    }
    assert others <= names
    assert not any(name.startswith("model.layers.") for name in names)
    assert config_of(tmp_path / "draft")["text_config"] == config_of(tiny(FAMILY))["text_config"]


@pytest.mark.parametrize("given", [None, "text", ...])
def test_a_configuration_without_its_part_is_refused(
    given: object, tiny: Folder, tmp_path: Path
) -> None:
    path = copied(tiny(FAMILY), tmp_path / "model")
    config = config_of(path)
    del config["text_config"]
    if given is not ...:
        config["text_config"] = given
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeqError, match=r"has text_config .*; it must describe the text model"):
        open_model(path)


def test_a_tensor_under_two_names_is_refused(tiny: Folder, tmp_path: Path) -> None:
    path = copied(tiny(FAMILY), tmp_path / "model")
    tensors = load_file(path / FILE)
    tensors["model.norm.weight"] = tensors[f"{PREFIX}norm.weight"].clone()
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=r"norm\.weight under two names"):
        open_model(path)


@pytest.mark.wide
def test_drafts_of_other_sizes_are_refused_by_what_their_part_says(
    tiny: Folder, tmp_path: Path
) -> None:
    quantise_to(tmp_path / "draft", tiny(FAMILY))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 48
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeqError, match="has moe_intermediate_size 48 and the model's has 32"):
        Generator.from_pretrained(
            tiny(FAMILY), "16MiB", dtype="float32", draft=str(tmp_path / "draft")
        )


def test_another_field_and_another_prefix(tmp_path: Path) -> None:
    part = TextModelPart("words", "text.model.", ("image.",), field="words_config")
    words = {"model_type": "words", "hidden_size": 4}
    assert part.config({"model_type": "both", "words_config": words}, tmp_path) == words
    assert part.config(words, tmp_path) is words
    assert part.called("text.model.norm.weight") == "model.norm.weight"
    assert part.stored("model.norm.weight") == "text.model.norm.weight"
    assert [part.is_beside(name) for name in ("image.a", "text.model.a")] == [True, False]
