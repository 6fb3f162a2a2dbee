"""DeepSeek-V4: entries of windows beside near tokens, and experts that token ids choose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator
from speq.errors import SpeqError
from speq.models.compressed_attention import windows_in
from speq.models.layer_range import LayerRange
from speq.models.opened import open_model
from speq.quantizing.models import quantize
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model

pytestmark = pytest.mark.skipif("deepseek_v4" not in FAMILIES, reason="transformers lacks it")

FILE = "model.safetensors"
RUN: dict[str, Any] = {"dtype": "float32", "profile": "none"}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(70)]
Folder = Callable[[str], Path]


def tokens_of(model: Path, count: int, **options: Any) -> list[int]:
    generator = Generator.from_pretrained(model, "64MiB", **(RUN | options))
    made = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
    generator.close()
    return made.token_ids


def test_windows_count_along_a_path() -> None:
    """Two branches after two tokens, of which the second token completes a window of 2."""
    visible = torch.tensor(
        [
            [1, 1, 1, 0, 0, 0],  # after tokens 0 and 1
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],  # another branch
            [1, 1, 0, 0, 1, 1],
        ],
        dtype=torch.bool,
    )
    found = windows_in(visible, visible.sum(1), 2, 2)
    assert found.rows.tolist() == [1, 3]
    assert found.starts.tolist() == [2, 2]
    assert found.slots.tolist() == [[0, 1, 2, 3], [0, 1, 4, 5]]
    first = windows_in(visible[:1, :2], torch.tensor([2]), 2, 2)
    assert first.slots.tolist() == [[-1, -1, 0, 1]]


@pytest.mark.parametrize(
    ("kinds", "overrides"),
    [
        ([SPARSE, SPARSE, HEAVY], {"index_topk": 1}),
        ([HEAVY, SPARSE, SPARSE], {"compress_rate_csa": 1, "compress_rate_hca": 70}),
        (["sliding_attention"] * 3, {"sliding_window": 2, "num_hash_layers": 3}),
        (
            [SPARSE, HEAVY, "sliding_attention"],
            {
                "num_hash_layers": 0,
                "hc_mult": 3,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 32,
                    "beta_slow": 1,
                },
            },
        ),
    ],
    ids=["one entry", "sizes", "near alone", "yarn"],
)
def test_layers_of_other_sizes(kinds: list[str], overrides: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "deepseek_v4", layer_types=kinds, **overrides)
    expected = greedy_tokens(load_plain(model), PROMPT, 24)
    assert tokens_of(model, 24, draft_length=3) == expected


def as_published(name: str) -> str:
    """A name of transformers' file as DeepSeek's files have it."""
    if name == "model.embed_tokens.weight":
        return "embed.weight"
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def test_names_as_published(tiny: Folder, tmp_path: Path) -> None:
    stored = load_file(tiny("deepseek_v4") / FILE)
    renamed: dict[str, Tensor] = {as_published(name): each for name, each in stored.items()}
    for name, tensor in renamed.items():
        if name.endswith("tid2eid"):
            renamed[name] = tensor.int()
    mtp = {"mtp.0.attn.wq_a.weight": torch.zeros(24, 64), "mtp.0.hc_head_base": torch.zeros(2)}
    assert {"norm.weight", "layers.1.ffn.gate.bias", "layers.0.attn.kv_norm.weight"} <= set(renamed)
    folder = tmp_path / "published"
    folder.mkdir()
    for file in tiny("deepseek_v4").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(renamed | mtp, folder / FILE, metadata={"format": "pt"})
    expected = greedy_tokens(load_plain(tiny("deepseek_v4")), PROMPT, 12)
    assert tokens_of(folder, 12) == expected


def test_token_ids_choose_experts_of_first_layers(tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny("deepseek_v4"), "64MiB", **RUN)
    model = generator.runtime.model
    blocks = [*model._family.moe_blocks(model._hf_model).values()]
    assert [block.by_token for block in blocks] == [True, False, False]
    # Of the second and third layer's experts, which rows of the first and second say.
    assert [block.experts._next_logits is None for block in blocks] == [False, False, True]
    generator.close()


def test_experts_that_token_ids_choose_are_not_forecast(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "deepseek_v4", num_hash_layers=2)
    generator = Generator.from_pretrained(model, "64MiB", **RUN)
    runs = generator.runtime.model
    blocks = [*runs._family.moe_blocks(runs._hf_model).values()]
    assert [block.experts._next_logits is None for block in blocks] == [True, False, True]
    generator.close()


def test_what_the_family_does_not_run_in_is_refused(tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"pass on several rows of a token .* run it on one"):
        open_model(tiny("deepseek_v4"), part=LayerRange(0, 2))
    with pytest.raises(SpeqError, match="layers look at token ids"):
        quantize(tiny("deepseek_v4"), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index_topk": 0}, "has index_topk 0; it must be at least 1"),
        ({"compress_rates": {SPARSE: 4}}, f"compress_rates of {HEAVY} None; it must be at least 1"),
        ({"swiglu_limit": 0.0}, "has swiglu_limit 0.0; it must be above 0"),
        (
            {"scoring_func": "sigmoid"},
            "speq knows models of family deepseek_v4 with 'sqrtsoftplus'",
        ),
    ],
)
def test_configurations_that_are_refused(
    changed: dict[str, Any], message: str, tiny: Folder, tmp_path: Path
) -> None:
    config = json.loads((tiny("deepseek_v4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / FILE).symlink_to(tiny("deepseek_v4") / FILE)
    with pytest.raises(SpeqError, match=message):
        open_model(tmp_path)
