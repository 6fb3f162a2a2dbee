"""What is qwen3_vl_moe's own: a text model that runs with qwen3_moe's classes, and experts whose
matrices are transposed on disk.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.models.opened import open_model
from tests.helpers.cells import Folder
from tests.helpers.fp8_files import write_fp8
from tests.helpers.packed_files import FAMILY_KINDS, Int4Kind, Nvfp4Kind, write_packed
from tests.helpers.picture_files import FILE, PREFIX, fused, stored_tensors
from tests.helpers.tiny_models import (
    FUSED,
    experts_alone,
    greedy_tokens,
    load_plain,
    transpose_experts,
    write_model,
)

FAMILY = "qwen3_vl_moe"
PROMPT, TOKENS = [*range(40, 70)], 24


def run(path: Path, drafts: bool = True) -> list[int]:
    generator = Generator.from_pretrained(path, "16MiB", dtype="float32", draft_length=3)
    result = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    generator.close()
    assert (result.stats["draft_length_mean"] > 0) == drafts
    return list(result.token_ids)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".speq"))
    return target


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "config.json").read_text())
    return content


def test_tokens_are_those_of_the_model_of_pictures_and_text(tiny: Folder, tmp_path: Path) -> None:
    """As published, as transformers saves it, and its text model alone."""
    path = tiny(FAMILY)
    expected = greedy_tokens(load_plain(path), PROMPT, TOKENS)
    shapes = {name: list(tensor.shape) for name, tensor in load_file(path / FILE).items()}
    experts = f"{PREFIX}layers.0.mlp.experts."
    assert shapes[f"{experts}gate_up_proj"] == [8, 64, 96]
    assert shapes[f"{experts}down_proj"] == [8, 48, 64]
    assert run(path) == expected

    saved = copied(path, tmp_path / "saved")
    transpose_experts(saved)
    assert greedy_tokens(load_plain(saved), PROMPT, TOKENS) == expected
    assert run(saved) == expected

    alone = copied(path, tmp_path / "alone")
    text = {**content_of(alone)["text_config"], "tie_word_embeddings": False}
    (alone / "config.json").write_text(json.dumps(text))
    save_file(stored_tensors(alone), alone / FILE, metadata={"format": "pt"})
    assert run(alone) == expected


def test_routers_divide_by_the_sum_whatever_the_configuration_says(
    tiny: Folder, tmp_path: Path
) -> None:
    path = copied(tiny(FAMILY), tmp_path / "model")
    content = content_of(path)
    content["text_config"]["norm_topk_prob"] = False
    (path / "config.json").write_text(json.dumps(content))
    assert run(path) == greedy_tokens(load_plain(path), PROMPT, TOKENS)


@pytest.mark.parametrize("width", [32, 64])
def test_a_square_matrix_is_read_as_the_other_one_lies(width: int, tmp_path: Path) -> None:
    """transformers takes a square matrix as it is; the one that it has saved is the reference."""
    path = write_model(tmp_path / "published", FAMILY, moe_intermediate_size=width)
    square = FUSED[0 if width == 32 else 1]
    tensors = load_file(path / FILE)
    assert all(t.shape[1:] == (64, 64) for name, t in tensors.items() if name.endswith(square))
    saved = copied(path, tmp_path / "saved")
    transpose_experts(saved)
    expected = greedy_tokens(load_plain(saved), PROMPT, TOKENS)
    assert run(saved) == expected
    assert run(path) == expected


@pytest.mark.parametrize("kind", FAMILY_KINDS[FAMILY])
def test_codes_of_experts_alone_run(kind: Int4Kind | Nvfp4Kind | None, tmp_path: Path) -> None:
    """As vendors publish such models in fewer bits. None: FP8"""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 128}
    source = write_model(tmp_path / "source", FAMILY, torch.bfloat16, **sizes)
    with_tensors(source, experts_alone(load_file(source / FILE)))
    path, words = tmp_path / "model", tmp_path / "words"
    if kind is None:
        write_fp8(path, words, source)
    else:
        write_packed(path, words, source, kind)
    with_tensors(words, fused(load_file(words / FILE)))
    # No INT4 copy is made of experts that take four bits already.
    assert run(path, drafts=kind is None) == greedy_tokens(load_plain(words), PROMPT, TOKENS)


def with_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    return path


def test_codes_of_all_experts_in_one_tensor_are_refused(tiny: Folder, tmp_path: Path) -> None:
    path = copied(tiny(FAMILY), tmp_path / "model")
    tensors = load_file(path / FILE)
    for name in [name for name in tensors if name.endswith(FUSED)]:
        rows, columns = tensors[name].shape[1:]
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        scales = torch.ones(8, -(-rows // 128), -(-columns // 128))
        tensors[f"{name}_scale_inv"] = scales
    content = content_of(path)
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(content))
    with_tensors(path, tensors)
    refused = r"has codes of fp8 of several matrices, .*; give a model with"
    with pytest.raises(SpeqError, match=refused):
        open_model(path)
