"""What becomes of a checkpoint's tensors: `tools.tensors`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.helpers.tiny_models import APART, BY_FAMILY, model_name
from tools.tensors import tensors_of

INDEX = "model.safetensors.index.json"


def with_index(source: Path, folder: Path, names: list[str]) -> Path:
    """A folder with the configuration of a model and an index of names."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def names_in(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return [*file.keys()]


def is_of_experts(name: str) -> bool:
    return ".experts." in name or APART.search(name) is not None


@pytest.mark.parametrize("family", BY_FAMILY)
def test_each_tensor_of_a_family_is_used(family: str, tiny: Callable[[str], Path]) -> None:
    """But for those of MTP layers and of pictures."""
    found, names = tensors_of(tiny(family)), names_in(tiny(family))
    beside = (
        *("mtp.", "model.visual.", "model.vision_tower.", "model.embed_vision."),
        *("vision_tower.", "multi_modal_projector.", "mm_projector.", "model.mm_projector."),
        *("patch_merge_mlp.", "vision_model.", "vit_large_projector."),
    )
    assert (found.family, found.unknown, found.missing) == (family, (), ())
    left = [name for name in names if name.startswith(beside) or ".ngram_embedding." in name]
    assert found.left == len(left)
    experts = sum(is_of_experts(model_name(name)) and "bias" not in name for name in names)
    beside_pictures = sum(".experts." in name and name.startswith("mtp.") for name in names)
    assert found.experts == experts - beside_pictures
    assert found.count == len(names)


def test_what_an_index_lacks_and_has_beyond(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    names = names_in(tiny("mixtral"))
    lost = [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.block_sparse_moe.experts.4.w1.weight",
    ]
    odd = "model.layers.0.self_attn.other.weight"
    kept = [name for name in names if name not in lost]
    found = tensors_of(with_index(tiny("mixtral"), tmp_path / "m", [*kept, odd]))
    assert found.missing == (lost[0], "expert 4 of layer 2, gate_proj")
    assert found.unknown == (odd,)
    assert found.count == len(names) - 1
